"""verl's words turned into RunConfig's: the rows of tables/verl_keys.toml."""

from collections.abc import Mapping
from typing import Any

from flowledger.config.settings import Draft, Settings, table
from flowledger.flow.errors import nearest

MISSING = "???"


def word(settings: Settings, kind: str, key: str) -> str | None:
    """The value of a key through one of the tables `words.*`; None where the key has none. Raises BadInput."""
    value = settings.get(key)
    if value is None:
        return None
    known: Mapping[str, str] = table("verl_keys")["words"][kind]
    found = known.get(str(value).removeprefix("torch.").lower())
    if found is None:
        raise settings.bad(key, f"is no {kind} of verl{nearest(str(value), known)}; use {', '.join(sorted(known)[:8])}")
    return found


def dataclass_default(key: str) -> Any:
    """What verl's dataclass gives a key that the composed configuration does not have."""
    return table("verl_keys")["dataclass"][key]


def put_rows(settings: Settings, draft: Draft) -> None:
    """Every key that is a key of RunConfig one to one."""
    for row in table("verl_keys")["row"]:
        key = row["key"]
        value = settings.get(key)
        if value == MISSING:
            raise settings.bad(key, f"is missing; give it, or go on with --assume {key}=VALUE")
        if row["to"] == "model.path":
            draft.put_model(key)
            continue
        draft.put(row["to"], _turned(row.get("how", {}), value), key)


def put_loss_rows(settings: Settings, draft: Draft) -> None:
    """The keys that only the chosen policy loss reads."""
    for row in table("verl_keys")["loss"].get(draft.data.get("algorithm", {}).get("policy_loss"), ()):
        draft.put(row["to"], settings.number(row["key"]), row["key"])


def _turned(how: Mapping[str, Any], value: Any) -> Any:
    spelt = str(value).lower() if isinstance(value, bool) else str(value)
    return how.get(spelt, value)
