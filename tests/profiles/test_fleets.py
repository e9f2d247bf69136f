"""Fleets by name and from files: the published draws, stragglers, and what files get wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from profiles.availability import Durations
from profiles.fleet_device import FleetDevice
from profiles.fleets import MAX_DEVICES, draw_link, find_fleet, fleet_names, paper_fleet, with_churn
from profiles.library import load_availability, load_network
from profiles.performance import Layout

RATES = ("flops_per_s", "uplink_bytes_per_s", "downlink_bytes_per_s")
GROUP = """\
[[group]]
name = "laptop"
count = 2
flops_per_s = 5e12
downlink_bytes_per_s = 50e6
uplink_bytes_per_s = 8_000_000
memory_bytes = 2_000_000_000
"""


def rates(device: FleetDevice) -> tuple[float, ...]:
    return tuple(getattr(device, field) for field in RATES)


def write(folder: Path, text: str) -> str:
    path = folder / "fleet.toml"
    path.write_text(text)
    return str(path)


# --- the published fleet ---


def test_the_first_devices_of_the_published_fleet() -> None:
    found = paper_fleet(64)[:3]
    # Compute, uplink, downlink.
    wanted = [
        (6547912097111.927, 8173591.600002954, 19306267.09502965),
        (5877756879504.1045, 7767897.003289979, 62888011.49599408),
        (6717195839822.765, 7796035.803727068, 25353367.168319747),
    ]
    np.testing.assert_allclose([rates(d) for d in found], wanted, rtol=1e-12)
    assert [d.memory_bytes for d in found] == [1245515864, 2662225344, 1306568633]


@pytest.mark.parametrize("devices", [0, -1, MAX_DEVICES + 1])
def test_fleets_of_impossible_size(devices: int) -> None:
    for of_size in (paper_fleet, lambda devices: find_fleet("home-mix", devices=devices)):
        with pytest.raises(ValueError, match=f"{devices} devices"):
            of_size(devices)


# --- stragglers ---


@pytest.mark.parametrize(("share", "slow"), [(0.0, 0), (0.1, 4), (0.25, 10), (1.0, 40)])
def test_stragglers_have_a_tenth_of_three_rates(share: float, slow: int) -> None:
    fleet, slowed = paper_fleet(40), paper_fleet(40, share)
    changed = [(a, b) for a, b in zip(fleet, slowed, strict=True) if a != b]
    assert len(changed) == slow
    for before, after in changed:
        assert rates(after) == pytest.approx([rate / 10 for rate in rates(before)])
        # Nothing else, memory least of all.
        assert (after.name, after.memory_bytes) == (before.name, before.memory_bytes)
        assert after.latency_s == before.latency_s


def test_stragglers_are_the_same_each_time() -> None:
    assert paper_fleet(40, 0.2) == paper_fleet(40, 0.2)
    assert find_fleet("paper-40", 0.2) == paper_fleet(40, 0.2)


def test_stragglers_in_a_fleet_from_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, GROUP)
    fast, slow = sorted(find_fleet(file, 0.5), key=lambda d: -d.flops_per_s)
    assert rates(slow) == pytest.approx([rate / 10 for rate in rates(fast)])
    assert slow.memory_bytes == fast.memory_bytes
    assert find_fleet(file, 0.5) == find_fleet(file, 0.5)


@pytest.mark.parametrize("share", [-0.1, 1.01, float("nan")])
def test_a_share_of_stragglers_is_a_share(share: float) -> None:
    with pytest.raises(
        ValueError, match=f"share of stragglers must be between 0 and 1, not {share}"
    ):
        paper_fleet(4, share)


# --- names and files ---


@pytest.mark.parametrize("name", ["paper-", "paper-x", "paper--4", "kampus-9", "fleet.json"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is no fleet '{name}'"):
        find_fleet(name)


def test_a_fleet_of_several_groups(tmp_path: Path) -> None:
    phone = """
[[group]]
flops_per_s = 1e12
downlink_bytes_per_s = 20e6
uplink_bytes_per_s = 5e6
memory_bytes = 1e9
latency_s = 0.02
active_power_w = 4
"""
    laptops_then_phone = find_fleet(write(tmp_path, GROUP + phone))
    laptop = FleetDevice("laptop-0", 5e12, 50e6, 8e6, 0.0, 2_000_000_000)
    assert laptops_then_phone == [
        laptop,
        replace(laptop, name="laptop-1"),
        FleetDevice("group2-0", 1e12, 20e6, 5e6, 0.02, 1_000_000_000, 4),
    ]
    assert type(laptops_then_phone[2].memory_bytes) is int


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("= 5e12", "= -5e12", "flops_per_s of device 'laptop-0' must be more than 0, not -5"),
        ("= 8_000_000", "= nan", r"group\[0\].uplink_bytes_per_s of .* not nan"),
        (
            "count = 2",
            "latency_s = -0.1",
            "latency_s of device 'laptop-0' must be 0 or more, not -0.1",
        ),
        ("= 50e6", "= 0", "downlink_bytes_per_s of device 'laptop-0' .*0"),
        ("= 50e6", "= nan", r"group\[0\].downlink_bytes_per_s of .* not nan"),
        ("= 2_000_000_000", "= -1", "memory_bytes of device 'laptop-0' .*-1"),
        ("= 5e12", "= 5", "flops_per_s of group 1 of .* must be from 1e.06 to 1e.17 FLOP/s, not 5"),
        ("= 50e6", "= 50", "downlink_bytes_per_s of group 1 .* bytes per second, not 50"),
        ("= 2_000_000_000", "= 2" + 30 * "0", r"group\[0\].memory_bytes of .* has 31 digits"),
        ("count = 2", "latency_s = 20_000", "latency_s of group 1 .* seconds, not 20000"),
        (
            "count = 2",
            "active_power_w = -4",
            "active_power_w of device 'laptop-0' must be 0 or more, not -4",
        ),
        ("count = 2", "colour = 'red'", "unknown key 'colour'"),
        (
            '"laptop"',
            '"' + 101 * "x" + '"',
            "name of group 1 of .* must be a string of 1 to 100 .*, not 'xxx",
        ),
        ('"laptop"', "3", "name of group 1 of .* not 3"),
        ("flops_per_s = 5e12\n", "", "lacks flops_per_s"),
        (
            "= 5e12",
            "= '5e12'",
            "flops_per_s of group 1 of .*fleet.toml must be a number, not '5e12'",
        ),
        ("= 50e6", "= true", "downlink_bytes_per_s of group 1 .* must be a number, not True"),
        ("count = 2", "count = -1", "count of group 1 .* not -1"),
        ("count = 2", "count = 1.5", "count of group 1 .* not 1.5"),
        ("count = 2", "count = 0", "fleet.toml has no devices"),
        ("[[group]]", "[[groups]]", "fleet.toml has the invalid entry 'groups'"),
        ("[[group]]", "[group]", "fleet.toml has the invalid entry 'group'"),
        ("[[group]]", "[[group", "fleet.toml cannot be read"),
    ],
    ids=str,
)
def test_what_a_file_gets_wrong_is_named(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    assert before in GROUP
    with pytest.raises(ValueError, match=said) as caught:
        find_fleet(write(tmp_path, GROUP.replace(before, after)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["x = 1" + 5000 * "0", "x = " + 5000 * "[" + 5000 * "]"], ids=len)
def test_what_is_too_much_for_toml(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"fleet\.toml cannot be read: .*(digits|recursion)"):
        find_fleet(write(tmp_path, text))


# --- groups made of profiles, networks, availabilities ---


@pytest.mark.parametrize("name", fleet_names())
def test_built_in_fleets_of_any_size(name: str) -> None:
    for devices in (1, 7, 100):
        fleet = find_fleet(f"{name}-{devices}", dtype="bf16")
        assert len(fleet) == devices
        assert fleet == find_fleet(name, devices=devices, dtype="bf16") or fleet[0].compute
        assert len({device.name for device in fleet}) == devices


def test_a_fleet_keeps_its_proportions() -> None:
    kinds = Counter(device.profile for device in find_fleet("phones-4g", devices=50))
    assert set(kinds.values()) == {10}


def test_links_are_drawn_from_the_spread_and_repeat_under_a_seed() -> None:
    fleet, again = (find_fleet("phones-4g-200") for _ in range(2))
    assert [rates(d) for d in fleet] == [rates(d) for d in again]
    assert len({d.downlink_bytes_per_s for d in fleet}) > 190
    assert [rates(d) for d in find_fleet("phones-4g-200", seed=7)] != [rates(d) for d in fleet]
    link = load_network("4g").link
    downs = sorted(d.downlink_bytes_per_s for d in fleet)
    assert downs[100] == pytest.approx(link.downlink_bytes_per_s.p50, rel=0.5)
    assert downs[20] == pytest.approx(link.downlink_bytes_per_s.p10, rel=0.6)


def test_fast_lines_are_fast_both_ways() -> None:
    rng = np.random.default_rng(1)
    drawn = np.log([draw_link(load_network("home").link, rng)[:2] for _ in range(2000)])
    assert 0.6 < np.corrcoef(drawn.T)[0, 1] < 0.8


def test_devices_of_a_household_share_its_line(tmp_path: Path) -> None:
    rates = "downlink_bytes_per_s = 9e6, uplink_bytes_per_s = 1e6"
    line = f'line = {{ name = "house", devices = 3, {rates} }}'
    text = GROUP.replace("count = 2", f"count = 4\n{line}") + GROUP.replace("count = 2", line)
    fleet = find_fleet(write(tmp_path, text))
    assert [d.bottleneck.name for d in fleet if d.bottleneck] == ["house-0"] * 3 + ["house-1"] * 2
    assert fleet[0].bottleneck == fleet[2].bottleneck


def test_what_a_group_says_goes_before_its_profile(tmp_path: Path) -> None:
    text = """
[[group]]
profile = "raspberry-pi-5"
network = "wifi-lan"
count = 2
memory_bytes = 5e8
uplink_bytes_per_s = 1e6
availability = { session = { mean_s = 60 } }
"""
    first, second = find_fleet(write(tmp_path, text))
    assert (first.memory_bytes, first.uplink_bytes_per_s) == (500_000_000, 1e6)
    assert first.downlink_bytes_per_s != second.downlink_bytes_per_s
    assert first.compute is not None
    assert first.availability is not None


def test_a_profile_states_the_throughput_of_the_asked_dtype(tmp_path: Path) -> None:
    text = '[[group]]\nprofile = "rtx-3060-laptop"\nnetwork = "home"\n'
    file = write(tmp_path, text)
    fp32, bf16 = (find_fleet(file, dtype=dtype)[0].flops_per_s for dtype in ("fp32", "bf16"))
    assert (fp32, bf16) == pytest.approx((7.83e12, 25.85e12))


def test_stragglers_of_a_group_are_slow_in_their_models_too(tmp_path: Path) -> None:
    text = '[[group]]\nprofile = "macbook-air-m1"\nnetwork = "wifi-lan"\nstragglers = 1\n'
    slow = find_fleet(write(tmp_path, text))[0]
    fast = find_fleet(write(tmp_path, text.replace("stragglers = 1", "")))[0]
    assert slow.compute is not None
    assert fast.compute is not None
    times = [
        d.compute.seconds("fp32", "fp32", Layout.NN, 64, 64, 64)
        for d in (slow, fast)
        if d.compute is not None
    ]
    assert times[0] == pytest.approx(10 * times[1])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('profile = "iphone-99"', "group 1 of .*: there is no profile 'iphone-99' in the library"),
        ("profile = 3", "profile of group 1 of .* must be a name or a .toml file, not 3"),
        ('network = "8g"', "group 1 of .*: there is no network '8g'"),
        ('availability = "never"', "group 1 of .*: there is no availability 'never'"),
        ("availability = { hours = [25, 3] }", "availability of group 1 .*: hours are 25 to 3"),
        ("stragglers = 2", "stragglers of group 1 .* must be a share from 0 to 1, not 2"),
        ("load = 1.0", "load of device 'laptop-0' must be .* less than 1, not 1.0"),
        ("loss = -0.1", "loss of device 'laptop-0' must be at least 0 .*, not -0.1"),
        ("drift_hurst = 1.5", "drift_hurst of device 'laptop-0' must be .* less than 1, not 1.5"),
        (
            'line = { name = "x", devices = 0, network = "home" }',
            "line.devices must be 1 or more, not 0",
        ),
        ('line = { name = "x", devices = 2 }', "line 'x' needs either a network, or"),
        (
            'line = { name = "x", devices = 2, downlink_bytes_per_s = 5, uplink_bytes_per_s = 5 }',
            "group 1 .*line.downlink_bytes_per_s must be from 100 to 1e.12 bytes per second, not 5",
        ),
        (
            "availability = { session = { mean_s = 1e-9 } }",
            "session.mean_s of availability of group 1 .* is 1e-09; expected float >= 0.1",
        ),
    ],
)
def test_what_a_group_gets_wrong_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        find_fleet(write(tmp_path, GROUP + line + "\n"))
    assert "\n" not in str(caught.value)


def test_two_different_sizes() -> None:
    with pytest.raises(ValueError, match="has 8 devices, but 9 were requested"):
        find_fleet("campus-8", devices=9)


# --- churn ---


def test_churn_in_seconds_and_by_name() -> None:
    device = with_churn(paper_fleet(2), "600:120")[0]
    assert device.availability is not None
    assert device.availability.session == Durations(600)
    assert device.availability.gap == Durations(120)
    assert all(
        d.availability == load_availability("volunteer").availability
        for d in with_churn(paper_fleet(3), "volunteer")
    )


@pytest.mark.parametrize(
    ("churn", "said"),
    [
        ("0", "churn '0'"),
        ("0.0001:1", "churn '0.0001:1'"),
        ("1" * 400, "churn '111"),
        ("-5:1", "churn '-5:1' is invalid; use mean seconds"),
        ("weekly", "churn 'weekly' .* one of always, .*volunteer"),
        ("nowhere.toml", r"nowhere\.toml cannot be read"),
    ],
)
def test_impossible_churn(churn: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_churn(paper_fleet(2), churn)
