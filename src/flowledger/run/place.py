"""Where in the loop an exception was raised."""

import traceback


def place_of(error: BaseException) -> str:
    """` in update_actor, step 3`, as far as the exception's frames tell; an empty string outside of a step."""
    stage = step = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module, name = frame.f_globals.get("__name__"), frame.f_code.co_name
        if module == "flowledger.run.loop" and name == "rl_step":
            step = frame.f_locals.get("step")
        elif module == "flowledger.run.stages" and stage is None:
            stage = name
    return ("" if stage is None else f" in {stage}") + ("" if step is None else f", step {step}")
