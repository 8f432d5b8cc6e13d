"""Which units get 8 bits: those whose damage, per bit that the cure costs, is largest.

A unit is one fused group of one layer, because engines run its linears as one product and want one scheme
for it. A model's average of bits counts all that the file holds for its linears, scales and zero points too,
over their weights.

    to a budget   the worst units by KL per bit are raised while the average stays within it
    step by step  the next worst, a tenth of all units at a time, for who measures after each step

The unit's cure is `w8a16-int8`, whose error is a hundredth of four bits'. What is 8 bits already is left
dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from qinfer.calibrate.sensitivity import Unit
from qinfer.checkpoint.names import layer_groups, linear_shape, num_weights
from qinfer.config import ModelConfig
from qinfer.errors import UserError
from qinfer.quant import Dense, Scheme, TensorSpec, W8A16Int8

_STEPS = 10  # in which all units would be raised


def cure_of(scheme: Scheme) -> Scheme:
    """What a unit of `scheme` is raised to."""
    return Dense() if isinstance(scheme, W8A16Int8) or scheme.name == "w8a16-fp8" else W8A16Int8()


def unit_bits(config: ModelConfig, group: str, scheme: Scheme, item_bytes: int) -> int:
    """Bits in the file of a group's linears; `item_bytes` is that of the model's dtype."""
    modules = next(g.modules for g in layer_groups(config) if g.name == group)
    specs = [scheme.specs(*linear_shape(config, module)) for module in modules]
    return sum(8 * _num_bytes(spec, item_bytes) for of in specs for spec in of.values())


def average_bits(config: ModelConfig, scheme: Scheme, mix: Mapping[Unit, Scheme], item_bytes: int) -> float:
    """Bits per weight over all linears."""
    bits = weights = 0
    for index in range(config.num_layers):
        for group in layer_groups(config):
            bits += unit_bits(config, group.name, mix.get((index, group.name), scheme), item_bytes)
            weights += num_weights(config, group.modules)
    return bits / weights


def ranked(config: ModelConfig, costs: Mapping[Unit, float], scheme: Scheme, item_bytes: int) -> list[Unit]:
    """Units, the one whose cure gains most per bit first."""
    cure = cure_of(scheme)
    price = {
        group.name: unit_bits(config, group.name, cure, item_bytes)
        - unit_bits(config, group.name, scheme, item_bytes)
        for group in layer_groups(config)
    }
    return sorted(costs, key=lambda unit: (-costs[unit] / max(1, price[unit[1]]), unit))


def check_budget(config: ModelConfig, scheme: Scheme, budget: float, item_bytes: int) -> None:
    """UserError unless `budget` lies between the bits per weight of the scheme and of all units raised."""
    least = average_bits(config, scheme, {}, item_bytes)
    units = ((index, group.name) for index in range(config.num_layers) for group in layer_groups(config))
    most = average_bits(config, scheme, dict.fromkeys(units, cure_of(scheme)), item_bytes)
    if not least <= budget <= most + 0.005:  # as it is told, in hundredths
        raise UserError(
            f"a budget of {budget:g} bits per weight is not between {least:.2f}, which {scheme.label} itself "
            f"takes, and {most:.2f} with every unit raised to {cure_of(scheme).label}",
            "budget",
        )


def within_budget(
    config: ModelConfig, order: Iterable[Unit], scheme: Scheme, budget: float, item_bytes: int
) -> dict[Unit, Scheme]:
    """The units of `order` to raise, as many as the average of `budget` bits allows.

    Raises as `check_budget`.
    """
    check_budget(config, scheme, budget, item_bytes)
    mix: dict[Unit, Scheme] = {}
    for unit in order:
        trial = {**mix, unit: cure_of(scheme)}
        if average_bits(config, scheme, trial, item_bytes) <= budget:
            mix = trial
    return mix


def next_step(order: list[Unit], mix: Mapping[Unit, Scheme], scheme: Scheme) -> dict[Unit, Scheme]:
    """The mix with the next tenth of all units raised; the same where none is left."""
    left = [unit for unit in order if unit not in mix]
    raised = left[: max(1, len(order) // _STEPS)]
    return {**mix, **dict.fromkeys(raised, cure_of(scheme))}


def _num_bytes(spec: TensorSpec, item_bytes: int) -> int:
    return prod(spec.shape) * (item_bytes if spec.dtype is None else spec.dtype.itemsize)
