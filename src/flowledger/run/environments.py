"""What answers the policy between its turns: a tool, a user, a game. `rollout.environment` names the function.

It is called when a turn has ended (with a stop token), in this process, with those of KEYWORDS that its signature
accepts, and returns what comes next: a text (what a user says), a message `{"role": …, "content": …}` for another role
(such as `tool`), or None where the response is done. After the last of `rollout.max_turns` turns it is not asked. Nothing
interrupts a call: a function that may hang keeps its own time.

Where it raises, or returns what is no answer, the response ends there and its sample is dropped as `environment_error`:
a tool that fails once costs one sample, as a reward that fails does. A chat template that cannot carry its answers ends
the run.

What it says becomes tokens of the response that the policy reads and is not trained on. Where the prompt was made with
the tokenizer's chat template, so are they: the rest of the policy's message, the new message, and the start of the
policy's next one, as the template writes them. Elsewhere they are the text alone. Tokens that were sampled stay as they
were: nothing is tokenised again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowledger.config.schema import Data, Rollout
from flowledger.flow.errors import BadInput
from flowledger.run import imports, keywords
from flowledger.run.exceptions import told
from flowledger.run.problems import Problem
from flowledger.run.prompts import Tokenizer, messages_of

# `messages` is the chat so far, the turn just ended last; `prompt` the problem's text; the rest as reward functions get.
KEYWORDS = ("messages", "prompt", "answer", "sample_id", "extra")

TURN = "@turn@"  # stands for what the policy said, to find what a template writes behind it

Message = Mapping[str, Any]


class NoAnswer(Exception):  # noqa: N818  (it says what there is)
    """The user's function raised, or returned what is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The user's function and how prompts are written."""

    function: Callable[..., Any]
    words: tuple[str, ...]  # those of KEYWORDS that it takes
    key: str
    data: Data


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """The chats of one rollout by sample index; sample index = prompt*G + k."""

    environment: Environment
    tokenizer: Tokenizer
    problems: Sequence[Problem]  # per prompt
    sample_id: Tensor  # int64 [B_prompt*G]
    messages: dict[int, list[Message]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)  # what happened where there was no answer

    def answer(self, index: int, turn: list[int]) -> list[int] | None:
        """The tokens that follow a turn, or None where the response is done, with an entry in `errors` where it failed.

        Raises BadInput where the chat template cannot carry the answer.
        """
        try:
            return self._answer(index, turn)
        except NoAnswer as fault:
            turns = sum(message["role"] == "assistant" for message in self.messages[index])
            self.errors[index] = f"{self.environment.key} {fault} after turn {turns}"
            return None

    def _answer(self, index: int, turn: list[int]) -> list[int] | None:
        problem = self.problems[index * len(self.problems) // len(self.sample_id)]
        chat = self.messages.setdefault(index, messages_of(problem, self.environment.data))
        chat.append({"role": "assistant", "content": self.tokenizer.decode(turn, skip_special_tokens=True)})
        message = self._ask(problem, chat, int(self.sample_id[index]))
        if message is None:
            return None
        chat.append(dict(message))  # the function may fill its own anew
        return self._tokens(message, turn[-1])

    def _ask(self, problem: Problem, chat: list[Message], sample: int) -> Message | None:
        e = self.environment
        known = {
            "messages": [dict(message) for message in chat], "prompt": problem.text, "answer": problem.answer,
            "sample_id": sample, "extra": dict(problem.extra),
        }  # fmt: skip
        try:
            said = e.function(**{word: known[word] for word in e.words})
        except (Exception, SystemExit) as error:  # noqa: BLE001  (the user's code may raise anything at all)
            raise NoAnswer(f"raised {told(error)}") from None
        if said is None:
            return None
        message = {"role": "user", "content": said} if isinstance(said, str) else said
        if isinstance(message, Mapping) and all(isinstance(message.get(part), str) for part in ("role", "content")):
            return message
        raise NoAnswer(
            f'returned a {type(said).__name__} (it must return a text, a message with "role" and "content", or None to '
            "end the response)"
        )

    def _tokens(self, message: Message, stop: int) -> list[int]:
        text = message["content"]
        if self.environment.data.chat_template and self.tokenizer.chat_template:
            text = self._behind_turn(message).removeprefix(self.tokenizer.decode([stop]))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise NoAnswer(f"returned what is no text ({told(error)})") from None
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _behind_turn(self, message: Message) -> str:
        """What the chat template writes between the text of a turn and the text of the next one."""
        behind = self._rendered(message)
        if message["content"].strip() and behind == self._rendered({**message, "content": ""}):
            raise BadInput(
                f"{self.environment.key}: the chat template leaves out what a message of role {message['role']!r} says "
                "after a turn of the policy; return a text, or set data.chat_template to false"
            )
        return behind

    def _rendered(self, message: Message) -> str:
        chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": TURN}, message]
        try:
            text = str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # noqa: BLE001  (a template raises what it likes, for instance for roles)
            raise BadInput(
                f"{self.environment.key}: the chat template refuses a message of role {message['role']!r} after a turn "
                f"of the policy ({told(error)}); return a text, or set data.chat_template to false"
            ) from None
        _, turn, behind = text.partition(TURN)
        if not turn:
            raise BadInput(
                f"{self.environment.key}: the chat template leaves out a turn of the policy once it is answered, so what "
                "follows the turn is not known; set data.chat_template to false"
            )
        return behind


def open_environment(settings: Rollout, data: Data) -> Environment | None:
    """The environment that `rollout` names, where it names one.

    Raises BadInput where there are turns to answer and no environment, or the other way round, and for a function that
    cannot be imported or asks for something else than KEYWORDS.
    """
    path, turns = settings.environment, settings.max_turns
    if (path is None) != (turns == 1):
        way = "name one, or set it to 1" if path is None else "set it to 2 or more, or leave the environment out"
        raise BadInput(f"rollout.max_turns = {turns} with rollout.environment = {path!r}: {way}")
    if path is None:
        return None
    key = f"rollout.environment = {path!r}"
    function = imports.load_function(path, key="rollout.environment")
    words = keywords.accepted(function, KEYWORDS, key=key)
    return Environment(function=function, words=words, key=key, data=data)
