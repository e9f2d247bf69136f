"""Compare the energy and carbon of a fleet with those of a data centre."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cleave.energy.account import (
    CloudUsage,
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
    """Ratios of a data centre's energy and carbon to those of a fleet for the same training.

    A ratio above 1 means that the fleet uses less energy or emits less carbon. None means unknown.

    Attributes:
        attributed: ratio of carbon, including a share of manufacturing for both.
        sunk_cost: ratio of carbon, including a share of manufacturing for the data centre only.
        operational: ratio of the carbon of electricity.
    """

    energy: float | None
    attributed: float | None
    sunk_cost: float | None
    operational: float | None


def ratios(fleet: Footprint, cloud: Footprint) -> Ratios:
    """Return the ratios of a data centre's energy and carbon to those of a fleet."""
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
    """The known inputs of a comparison. Assumptions are given separately as a `Case`.

    Attributes:
        usages: usage of the fleet's devices, grouped by profile.
        profiles: maps the name of a profile to the profile.
        typical: typical power, used for devices whose profile specifies no power.
        ps: energy of the PS; None if unknown.
        cloud: usage of the data centre; None to account for the fleet alone.
    """

    usages: Sequence[DeviceUsage]
    profiles: Mapping[str, DeviceProfile]
    typical: Typical
    ps: Ps | None = None
    cloud: CloudUsage | None = None

    @property
    def kinds(self) -> set[DeviceKind]:
        """Return the known kinds of the fleet's devices and of the data centre's GPU."""
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
        """Return the ratios of the data centre to the fleet under the assumptions of a case.

        Raises:
            ValueError: if `cloud` is None.
        """
        if self.cloud is None:
            raise ValueError("there is no data centre to compare with")
        cloud = cloud_footprint(self.cloud, case.assumptions, case.cloud_gco2e_per_kwh)
        return ratios(self.fleet(case), cloud)

    def figure(self, case: Case) -> float | None:
        """Return the figure whose sensitivities are shown; None if unknown.

        The figure is the ratio of attributed carbon. Without a data centre, it is the fleet's
        attributed carbon in gCO2e.
        """
        if self.cloud is None:
            return self.fleet(case).attributed_gco2e
        return self.ratios(case).attributed
