"""How much a checkpoint may lose: the limits that the gate judges by, and how they scale.

Limits depend on how coarse the format is, since nobody chooses 4 bits to get the fidelity of 8, and on the
size of the model, since small models lose more. They are the one table below; `docs/thresholds.md` says from
what measurements they were derived and `benchmarks/thresholds.py` makes those measurements again.

A profile says how much is measured and how strictly it is judged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from qinfer.errors import UserError

SchemeClass = Literal["w16", "w8a16", "w8a8", "w4a16"]  # finest first


class Limits(NamedTuple):
    """What may be lost: KL in nats per token, shares of positions, of the source's perplexity, accuracy."""

    mean_kl: float
    p99_kl: float
    disagreement: float  # positions whose most likely token changed
    perplexity_excess: float  # ratio - 1
    accuracy_lost: float  # share of the source's accuracy above chance, on tasks

    def scaled(self, factor: float) -> Limits:
        """All limits times `factor`."""
        return Limits(*(factor * limit for limit in self))


class Profile(NamedTuple):
    """How much is measured and how strictly it is judged."""

    num_tokens: int
    scale: float  # of the limits
    tasks: tuple[str, ...] = ()  # asked too, unless others are named


PROFILES: Mapping[str, Profile] = {
    "strict": Profile(24_576, 0.7, ("builtin",)),
    "standard": Profile(16_384, 1.0),
    "lenient": Profile(8_192, 1.2),  # plain rounding to 4 bits must fail this one too
}

# ---- The table of limits, per class of scheme, for profile "standard": (up to 1B, from 7B parameters) -----
# Small end: between what must pass and what must fail on SmolLM2-135M-Instruct and Gemma 3 270M and on two
# texts; of tasks on SmolLM2 alone, where they tell; docs/thresholds.md has the measurements and the rule.
# Large end, not measured here: llama.cpp's published KL tables of 7-8B models (q8_0 0.0014, q4_K_M 0.031 with
# 8 % disagreement); of tasks what 1,500 questions can decide there. Between 1B and 7B each limit is
# interpolated in the logarithms. "w16" (dense against dense: another dtype, another KV cache) is judged like
# 8-bit weights. Re-derive here, and only here.
LIMITS: Mapping[SchemeClass, tuple[Limits, Limits]] = {
    #         mean KL, p99 KL, disagreement, perplexity excess, accuracy lost
    "w16": (Limits(0.006, 0.03, 0.045, 0.005, 0.050), Limits(0.003, 0.03, 0.025, 0.003, 0.015)),
    "w8a16": (Limits(0.007, 0.035, 0.050, 0.008, 0.050), Limits(0.003, 0.03, 0.025, 0.003, 0.015)),
    "w8a8": (Limits(0.040, 0.30, 0.115, 0.045, 0.080), Limits(0.020, 0.20, 0.050, 0.010, 0.025)),
    "w4a16": (Limits(0.160, 1.45, 0.215, 0.195, 0.220), Limits(0.050, 0.50, 0.090, 0.035, 0.050)),
}
OTHER_TEXT = 1.25  # times those limits for a text other than the built-in one: the same damage shows more
SMALL, LARGE = 1e9, 7e9  # parameters
# ------------------------------------------------------------------------------------------------------------

_NAME = re.compile(r"w(?P<weight>\d+)a(?P<activation>\d+)(?:-(?P<kind>int8|fp8))?(?:-.*)?")


def profile_named(name: str) -> Profile:
    """The profile of that name; raises UserError naming the known ones."""
    if name not in PROFILES:
        raise UserError(f"unknown profile {name!r}; known: {', '.join(PROFILES)}", "profile")
    return PROFILES[name]


def scheme_class(scheme_names: Collection[str]) -> SchemeClass:
    """The class of a model with these schemes in it: that of the coarsest (a model of none is "w16").

    Raises UserError for a scheme of which nothing is known.
    """
    order = list(LIMITS)
    return max((_class_of(name) for name in scheme_names), key=order.index, default="w16")


def limits_for(
    scheme: SchemeClass, num_parameters: int, profile: Profile, *, other_text: bool = False
) -> Limits:
    """Limits for a source of that many parameters, interpolated in the logarithms between SMALL and LARGE.

    `other_text`: what is read is not the built-in text. What may be lost on tasks is not changed by that.
    """
    small, large = LIMITS[scheme]
    share = (math.log(max(num_parameters, 1)) - math.log(SMALL)) / (math.log(LARGE) - math.log(SMALL))
    share = min(max(share, 0.0), 1.0)
    between = (a ** (1 - share) * b**share for a, b in zip(small, large, strict=True))
    limits = Limits(*between).scaled(profile.scale)
    if not other_text:
        return limits
    return limits.scaled(OTHER_TEXT)._replace(accuracy_lost=limits.accuracy_lost)


def _class_of(name: str) -> SchemeClass:
    """By the bits in a scheme's name. e4m3 has three bits of fraction: as weights alone it is no finer than
    int8 for weights and activations.
    """
    if name == "dense":
        return "w16"
    found = _NAME.fullmatch(name)
    if found is None or (bits := int(found["weight"])) not in (4, 8):
        raise UserError(f"the gate has no limits for the scheme {name!r}: it knows 4 and 8 bits", "scheme")
    if bits == 4:
        return "w4a16"
    return "w8a16" if found["activation"] == "16" and found["kind"] != "fp8" else "w8a8"
