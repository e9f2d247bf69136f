"""The comparison of a fleet with a data centre: ratios of energy and carbon."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cleave.energy.account import (
    CloudSpell,
    DeviceUsage,
    Footprint,
    Ps,
    cloud_footprint,
    fleet_footprint,
)
from cleave.energy.sensitivity import Case
from cleave.energy.typical import Typical
from profiles.device_profile import DeviceKind, DeviceProfile


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of data centre over fleet: above 1 the fleet takes less. None if a figure is unknown.

    Attributes:
        energy: ratio of joules.
        attributed: ratio of carbon, with the share of making on both sides.
        sunk_cost: ratio of carbon, with the share of making for the data centre only.
        operational: ratio of carbon of electricity alone.
    """

    energy: float | None
    attributed: float | None
    sunk_cost: float | None
    operational: float | None


def ratios(fleet: Footprint, cloud: Footprint) -> Ratios:
    """Return the ratios of two footprints of the same training."""
    here, there = fleet.operational_gco2e, cloud.operational_gco2e
    if not fleet.complete:
        return Ratios(None, None, None, None)
    energy = _over(cloud.energy_j, fleet.energy_j)
    if here is None or there is None:
        return Ratios(energy, None, None, None)
    whole_there = None if cloud.embodied_unknown else there + cloud.embodied_gco2e
    whole_here = None if fleet.embodied_unknown else here + fleet.embodied_gco2e
    return Ratios(
        energy, _over(whole_there, whole_here), _over(whole_there, here), _over(there, here)
    )


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or b <= 0 else a / b


@dataclass(frozen=True, slots=True)
class ComparisonQuestion:
    """The facts that are compared, without the assumptions.

    Attributes:
        cloud: usage of the data centre; None to account for the fleet alone.
    """

    usages: Sequence[DeviceUsage]
    profiles: Mapping[str, DeviceProfile]
    typical: Typical
    ps: Ps | None = None
    cloud: CloudSpell | None = None

    @property
    def kinds(self) -> set[DeviceKind]:
        """Return the kinds of the devices and of the data centre's GPU."""
        found = (usage.kind_by(self.profiles) for usage in self.usages)
        kinds = {kind for kind in found if kind is not None}
        return kinds if self.cloud is None else kinds | {self.cloud.profile.kind}

    def fleet(self, case: Case) -> Footprint:
        return fleet_footprint(
            self.usages,
            self.profiles,
            self.typical.at(case.class_power),
            case.assumptions,
            case.fleet_gco2e_per_kwh,
            self.ps,
        )

    def ratios(self, case: Case) -> Ratios:
        """Return the ratios of data centre over fleet in a case.

        Raises:
            ValueError: when there is no data centre to compare with.
        """
        if self.cloud is None:
            raise ValueError("there is no data centre to compare with")
        cloud = cloud_footprint(self.cloud, case.assumptions, case.cloud_gco2e_per_kwh)
        return ratios(self.fleet(case), cloud)

    def figure(self, case: Case) -> float | None:
        """Return the ratio of attributed carbon, or the fleet's carbon without a data centre."""
        if self.cloud is None:
            return self.fleet(case).attributed_gco2e
        return self.ratios(case).attributed
