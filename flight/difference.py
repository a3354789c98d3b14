"""
Where a replay differs from what was recorded, in words.
"""

from collections.abc import Mapping

import msgspec

from engine.journal import Divergence, PlanNote, SliceNote

Names = Mapping[int, str]
"""Of requests, by the number of their sequence."""


def difference(divergence: Divergence, names: Names) -> str:
    """The first thing that is not the same."""
    recorded, replayed = divergence.recorded, divergence.replayed
    if isinstance(recorded, PlanNote) and isinstance(replayed, PlanNote):
        return _of_plans(recorded, replayed, names)
    return _of_values(msgspec.to_builtins(recorded), msgspec.to_builtins(replayed), "")


def _of_plans(recorded: PlanNote, replayed: PlanNote, names: Names) -> str:
    was = {piece.sequence: piece for piece in recorded.slices}
    now = {piece.sequence: piece for piece in replayed.slices}
    for number in sorted(was.keys() | now.keys()) if recorded.step_id == replayed.step_id else ():
        if number not in now:
            return f"{_who(number, names)} was served, with {_count(was[number])}, and is not in the replay"
        if number not in was:
            return f"{_who(number, names)} was not served, and is in the replay, with {_count(now[number])}"
    if recorded.step_id != replayed.step_id:
        return f"in the replay it is step {replayed.step_id}"
    if list(was) != list(now):
        return f"the order was {list(was)}, and in the replay it is {list(now)}"
    number = next(number for number in was if was[number] != now[number])
    return f"{_who(number, names)} had {_of_slices(was[number], now[number])}"


def _who(number: int, names: Names) -> str:
    return f"sequence {number}" + (f" ({names[number]})" if number in names else "")


def _count(piece: SliceNote) -> str:
    drafts = f", {piece.drafts} of them guessed," if piece.drafts else ""
    return f"{len(piece.tokens)} token{'s' * (len(piece.tokens) != 1)}{drafts} from position {piece.start}"


def _of_slices(was: SliceNote, now: SliceNote) -> str:
    if _count(was) != _count(now):
        return f"{_count(was)}, and in the replay {_count(now)}"
    if was.tokens != now.tokens:
        place = next(place for place, pair in enumerate(zip(was.tokens, now.tokens, strict=True)) if pair[0] != pair[1])
        return f"token {was.tokens[place]} at position {was.start + place}, and in the replay {now.tokens[place]}"
    if (was.kept, was.blocks) != (now.kept, now.blocks):
        return f"blocks {_table(was)}, and in the replay {_table(now)}"
    return f"the random numbers {list(was.uniforms)}, and in the replay {list(now.uniforms)}"


def _table(piece: SliceNote) -> str:
    kept = f"as before up to number {piece.kept}, then " if piece.kept else ""
    return f"{kept}{list(piece.blocks) if piece.blocks else 'no more'}"


def _of_values(was: object, now: object, where: str) -> str:
    """The first place at which two values of the same shape are not the same."""
    if isinstance(was, dict) and isinstance(now, dict) and was.keys() == now.keys():
        for key in was:
            if was[key] != now[key]:
                return _of_values(was[key], now[key], f"{where}.{key}" if where else str(key))
    if isinstance(was, list | tuple) and isinstance(now, list | tuple) and len(was) == len(now):
        for place, (one, other) in enumerate(zip(was, now, strict=True)):
            if one != other:
                return _of_values(one, other, f"{where}[{place}]")
    return f"{where} was {_short(was)}, and in the replay is {_short(now)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
