"""`cleave plan`: forecast a training step by each method, and name the bottleneck."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from cleave.errors import UsageError, choice_of
from cleave.training.loop.job import DEFAULT_BATCH, DEFAULT_SEQ
from cleave_cli.options import Json, check_plot, counted
from cleave_cli.render.text import Csv, Form, form_of, write_csv

if TYPE_CHECKING:
    from cleave.planner.forecast import Crossing, CrossingPoint, MethodChoice
    from cleave.planner.plan import DeviceRates, ElementBytes, Method, PsRates
    from cleave.planner.tiles.planner import TilePlanner
    from cleave_cli.plan_question import PlanQuestion

_LEAST_GBIT = 1e-3
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_MOST_SIDE = 2**31  # of a GEMM; larger sizes overflow the planner's integers
_MOST_TOKENS = 2**18  # maximum tokens per step in the search for the crossing


def plan(
    model: Annotated[str, Option(help="Model name, such as opt-13b.")] = "",
    gemm: Annotated[str, Option(help="One GEMM instead of a model: M,N,K.")] = "",
    batch: Annotated[int, Option(help="Sequences per step.")] = DEFAULT_BATCH,
    seq: Annotated[int, Option(help="Tokens per sequence.")] = DEFAULT_SEQ,
    fleet: Annotated[
        str, Option(help="Fleet: paper-N, home-mix-N, ..., or a TOML file.")
    ] = "paper-256",
    stragglers: Annotated[
        float, Option(help="Share of devices slowed to a tenth of their speed.")
    ] = 0.0,
    dtype: Annotated[str, Option(help="Dtype: bf16, fp16 or fp32.")] = "fp32",
    gradients: Annotated[str, Option(help="Dtype of stages' gradients; default: --dtype.")] = "",
    lora: Annotated[int, Option(help="Rank of adapters to train; 0 trains the whole model.")] = 0,
    lora_bits: Annotated[int, Option(help="Bits per frozen weight, 4 or 8; 0 uses --dtype.")] = 0,
    method: Annotated[
        str, Option(help="Method: auto, stages, tiles, local (no devices), or diloco (not exact).")
    ] = "auto",
    every: Annotated[int, Option(help="With diloco: local steps between exchanges.", min=1)] = 50,
    fragments: Annotated[
        int, Option(help="With diloco: parts of the model, exchanged in turn.", min=1)
    ] = 1,
    overlap: Annotated[int, Option(help="With diloco: local steps per exchange.", min=0)] = 0,
    exchange: Annotated[str, Option(help="With diloco: fp32, bf16, int8 or sparse.")] = "bf16",
    state: Annotated[
        str, Option(help="Where stages keep weights and optimizer state: server, devices, or auto.")
    ] = "server",
    tiling: Annotated[
        str, Option(help="Tiling: 3d, or 2d (rows and columns only, as published).")
    ] = "3d",
    fused: Annotated[
        bool,
        Option(
            "--fused/--unfused",
            help="Plan Linears that share an input as one GEMM. Training runs them separately.",
        ),
    ] = False,
    ps_gflops: Annotated[float, Option(help="Server's GFLOP/s; 0 uses this machine's.")] = 0.0,
    ps_gbit: Annotated[
        float, Option(help="Speed of the PS's network card each way in Gbit/s; 0 means unlimited.")
    ] = 0.0,
    coding: Annotated[
        str, Option(help="Count payloads as compressed: auto (on slow links), on, off.")
    ] = "auto",
    ps_memory: Annotated[
        float, Option(help="Memory for partial sums on the PS in GB; 0 means unlimited.")
    ] = 0.0,
    crossing: Annotated[
        bool,
        Option(
            "--crossing", help="Find the number of tokens per step above which stages are faster."
        ),
    ] = False,
    servers: Annotated[str, Option(help="Compare these numbers of servers, such as 1,2,4.")] = "",
    memory: Annotated[
        str, Option(help="With --servers: plain, or sharded (by tiles), as for cleave train.")
    ] = "plain",
    tiles: Annotated[bool, Option("--tiles", help="With --json: list every tile.")] = False,
    plot: Annotated[Path | None, Option(help="Plot the chosen plan, or the crossing.")] = None,
    as_json: Json = False,
    as_csv: Csv = False,
) -> None:
    """Forecast a training step by each method, without running it, and name the bottleneck.

    Examples:

      cleave plan --model opt-1.3b --batch 64 --seq 512 --fleet home-mix-9 --ps-gbit 1

      cleave plan --model opt-125m --fleet home.toml --crossing --ps-gflops 500

      cleave plan --model opt-1.3b --batch 64 --fleet home-mix-9 --method stages --plot stages.png

      cleave plan --model opt-13b --batch 128 --fleet paper-1024 --servers 1,4,16

      cleave plan --gemm 4096,4096,4096 --fleet home.toml --tiles --json
    """
    from rich.console import Console

    from cleave.machine.load import OtherLoad
    from cleave.planner.coding import CodingPolicy, payload_rates
    from cleave.planner.local_updates import ExchangeKind, Rounds
    from cleave.planner.plan import PS_BLOCK_S, PS_BYTE_S, ElementBytes, Method, PsRates, StateMode
    from cleave.planner.tiles.planner import PlanMethod, TilePlanner
    from cleave.workload.registry import find_model
    from cleave.workload.stages import StageSizes
    from cleave.workload.step import step_gemms
    from cleave_cli.plan_question import (
        PlanQuestion,
        adapters_of,
        alone_by_dtype,
        fleet_devices,
        rates_of,
        server_of,
    )
    from cleave_cli.render import plan as render

    if bool(model) == bool(gemm):
        raise UsageError("pass either --model or --gemm, as in: cleave plan --model opt-13b")
    for option, value in (("--dtype", dtype), ("--gradients", gradients or dtype)):
        if value not in _ELEMENT_BYTES:
            raise UsageError(f"{option} is {value!r}; use one of {', '.join(_ELEMENT_BYTES)}")
    for name, number in (
        ("--ps-gbit", ps_gbit), ("--ps-memory", ps_memory), ("--ps-gflops", ps_gflops),
    ):  # fmt: skip
        if not 0 <= number < math.inf:
            raise UsageError(f"{name} must be 0 or more, not {number}")
    if 0 < ps_gbit < _LEAST_GBIT:
        raise UsageError(
            f"--ps-gbit must be at least {_LEAST_GBIT:g}, or 0 for no limit, not {ps_gbit:g}"
        )
    form = form_of(as_json=as_json, as_csv=as_csv)
    counts = _server_counts(servers)
    if counts and (gemm or crossing or plot is not None):
        raise UsageError("--servers cannot be combined with --gemm, --crossing or --plot")
    if plot is not None:
        check_plot(plot)
    if memory not in ("plain", "sharded"):
        raise UsageError(f"--memory is {memory!r}; use plain or sharded")
    sharded = memory == "sharded"
    if sharded and not counts:
        raise UsageError("--memory sharded needs --servers")
    if sharded and (method == "stages" or lora):
        raise UsageError(
            "--memory sharded works only with tiles of whole models; omit --method stages and "
            "--lora"
        )
    if tiles and not (gemm and form is Form.JSON):
        raise UsageError("--tiles lists the tiles of one GEMM as JSON; add --gemm M,N,K and --json")
    if method in {member.value for member in PlanMethod}:
        raise UsageError(f"--method {method} is a kind of tiling; use --tiling {method}")
    by = choice_of(Method, "--method", method)
    where_state = choice_of(StateMode, "--state", state)
    by_stages = not (counts or gemm or by in (Method.TILES, Method.LOCAL, Method.DILOCO))
    if where_state is not StateMode.SERVER and not by_stages:
        raise UsageError(
            f"--state {state} needs stages on one server; omit --gemm, --servers and other methods"
        )
    profiles = fleet_devices(fleet, stragglers, dtype)
    policy = CodingPolicy.of(coding)
    card = ps_gbit * 1e9 / 8 or float("inf")
    ps = PsRates(card, card, ps_memory * 1e9 or float("inf"))
    by_link = rates_of(profiles, policy, ps)
    devices = payload_rates(by_link, dtype)  # plans by tiles use uncompressed bytes/s
    element = ElementBytes(_ELEMENT_BYTES[dtype], _ELEMENT_BYTES[dtype])
    spared = replace(ps, block_s=PS_BLOCK_S, byte_s=PS_BYTE_S)  # with a real server's costs
    planner = TilePlanner(spared, choice_of(PlanMethod, "--tiling", tiling))
    if gemm:
        if by is not Method.AUTO or crossing:
            option = "--crossing" if crossing else f"--method {method}"
            raise UsageError(f"{option} is for whole steps; use --model instead of --gemm")
        _plan_gemm(gemm, planner, element, devices, ps, plot, tiles=tiles, form=form)
        return
    spec = find_model(model)
    gemms, adapters = step_gemms(spec, batch, seq, fused), adapters_of(lora, lora_bits, spec)
    if plot is not None and by is Method.LOCAL and not crossing:
        raise UsageError("--plot shows the work of devices; omit --method local")
    sizes = StageSizes(spec, seq, element.sent, _ELEMENT_BYTES[gradients or dtype], adapters)
    in_fp32 = rates_of(fleet_devices(fleet, stragglers, "fp32"), policy, ps)
    others = OtherLoad()
    server_speed = server_of(sizes, ps_gflops, dtype, ps)
    under_load = "" if ps_gflops else others.remark()
    question = PlanQuestion(
        sizes,
        batch,
        dtype,
        gemms,
        planner,
        element,
        devices,
        in_fp32,
        server_speed,
        on_devices=where_state is StateMode.DEVICES,
        rounds=Rounds(every, choice_of(ExchangeKind, "--exchange", exchange), fragments, overlap),
    )
    why_there = ""
    if where_state is StateMode.AUTO:
        question, why_there = question.with_best_state()
    if counts:
        about = f"{model}, {batch} sequences of {seq} tokens, {dtype}, {fleet}"
        if sharded and by is Method.AUTO:
            by = Method.TILES
        _plan_servers(question, counts, by, fused, about, form, sharded=sharded)
        return
    with Console(stderr=True).status(f"planning a step of {model}"):
        found = question.choose(by)
    alone_s = alone_by_dtype(question) if not ps_gflops else {}
    with_own_s = question.with_own_device_s(found)
    where = _crossing(question, by) if crossing else None
    names = [profile.name for profile in profiles]
    trained = (
        f"{model}{f', LoRA of rank {lora}' if lora else ''}"
        f"{f' on weights in {lora_bits} bits' if lora_bits else ''}"
    )
    there = f"{dtype}, {fleet}: {counted(len(devices), 'device')}"
    about = f"{trained}, {batch} sequences of {seq} tokens, {there}"
    if plot is not None:
        title = about if where is None else f"{trained}, sequences of {seq} tokens, {there}"
        _draw(plot, found, where, question, names, title)
    dtypes = list(dict.fromkeys((dtype, gradients or dtype)))
    if form is not Form.PEOPLE:
        document = {
            **render.methods_json(found),
            "server_flops_per_s": question.ps.flops_per_s,
            "measured_under_load": under_load,
            "server_alone_s": alone_s,
            "with_own_device_s": with_own_s,
            "stages": None if found.stages is None else render.stages_json(*found.stages, names),
            "tiles": None if found.tiles is None else render.step_json(found.tiles, gemms),
            "crossing": None if where is None else render.crossing_json(where, seq),
            "coding": render.coding_json(policy, by_link, dtypes),
            "state": (StateMode.DEVICES if question.on_devices else StateMode.SERVER).value,
        }
        if form is Form.JSON:
            typer.echo(json.dumps(document))
        else:
            write_csv(document["methods"] if where is None else document["crossing"]["points"])
        return
    alone = "from --ps-gflops" if ps_gflops else f"measured here {under_load}".rstrip()
    title = (
        f"{about}; the server computes {question.ps.flops_per_s / 1e9:.3g} GFLOP/s, {alone}"
        f"{render.coding_text(by_link, dtypes)}{f'; {why_there}' if why_there else ''}"
    )
    render.show_methods(title, found)
    render.show_faster_dtype(found, dtype, alone_s)
    if with_own_s is not None:
        render.show_own_device(with_own_s)
    if found.chosen.method is Method.STAGES and found.stages is not None:
        render.show_stages(*found.stages, names)
    elif found.chosen.method is Method.TILES and found.tiles is not None:
        render.show_step(found.tiles, gemms)
    if where is not None:
        render.show_crossing(where, seq)


def _server_counts(text: str) -> list[int]:
    """Parse `--servers`, such as `1,2,4`; return the sorted numbers."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--servers is {text!r}; use numbers of servers, such as 1,2,4")
    return sorted({int(part) for part in parts})


def _plan_servers(
    question: PlanQuestion,
    counts: list[int],
    method: Method,
    fused: bool,
    about: str,
    form: Form,
    *,
    sharded: bool,
) -> None:
    """Forecast a step for each number of servers, with a progress bar, and print the results."""
    from rich.console import Console
    from rich.progress import Progress

    from cleave.planner.servers import SharedWeights, plan_servers, shares, weakest
    from cleave.workload.stages import recomputed_elements
    from cleave.workload.step import step_gemms
    from cleave_cli.render.plan import servers_json, show_servers

    devices, rows = len(question.devices), question.rows
    most = min(devices, rows)
    if counts[-1] > most:
        raise UsageError(
            f"--servers is {counts[-1]}, but there are only {counted(devices, 'device')} and "
            f"{counted(rows, 'sequence')}; use {most} or fewer"
        )
    sizes = question.sizes
    spec, layer = sizes.spec, sum(parameter.size for parameter in sizes.layer)
    again_bytes = recomputed_elements(spec) * sizes.sequence * question.element.sent
    outside = spec.parameters - spec.layers * layer
    weights = SharedWeights(spec.layers, layer, outside, again_bytes) if sharded else None
    plans = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for count in progress.track(counts, description="servers"):
            parts = shares(question.devices, count)
            in_fp32 = shares(question.in_fp32, count)
            most_rows = -(-rows // count)
            found = [
                replace(
                    question,
                    rows=most_rows,
                    gemms=step_gemms(sizes.spec, most_rows, sizes.sequence, fused),
                    devices=_numbered(parts[number]),
                    in_fp32=_numbered(in_fp32[number]),
                )
                .choose(method)
                .considered
                for number in weakest(in_fp32)
            ]
            trained = sizes.trained_parameters
            card = question.ps.rates
            plans.append(plan_servers(count, devices, rows, found, trained, card, weights))
    if form is Form.CSV:
        write_csv(servers_json(plans))
    elif form is Form.JSON:
        typer.echo(json.dumps({"servers": servers_json(plans)}))
    else:
        show_servers(about, plans)


def _numbered(devices: list[DeviceRates]) -> list[DeviceRates]:
    return [replace(rates, device=number) for number, rates in enumerate(devices)]


def _crossing(question: PlanQuestion, method: Method) -> Crossing:
    """Search for the smallest batch at which stages are faster than the server alone."""
    from rich.console import Console
    from rich.progress import Progress

    from cleave.planner.forecast import CrossingPoint, crossing, most_points
    from cleave.planner.plan import Method

    if method not in (Method.AUTO, Method.STAGES):
        raise UsageError(f"--crossing needs forecasts of stages; omit --method {method.value}")
    most = max(1, _MOST_TOKENS // question.sizes.sequence)

    def predict(rows: int) -> CrossingPoint:
        forecaster = question.sizes.forecaster(rows, question.ps)
        stages_s = question.by_stages(forecaster).step_s
        return CrossingPoint(rows, stages_s, forecaster.alone().step_s)

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("batches", total=most_points(most))
        return crossing(predict, most, lambda point: progress.advance(task))


def _draw(
    path: Path,
    found: MethodChoice,
    where: Crossing | None,
    question: PlanQuestion,
    names: list[str],
    title: str,
) -> None:
    """Plot the crossing; without a crossing, plot the stages, or the tiles of the slowest GEMM."""
    from cleave.planner.plan import Method
    from cleave.planner.stages.prediction import simulated_devices
    from cleave_cli.render.plots import draw_crossing, draw_stages, draw_tiling

    if where is not None:
        draw_crossing(path, where, question.sizes.sequence, title)
    elif found.stages is not None and found.chosen.method is not Method.TILES:
        model, plan = found.stages
        rates = {device.device: device for device in question.in_fp32}
        devices = simulated_devices(model, plan, rates, question.ps)
        draw_stages(path, model, plan, devices, names, title)
    elif found.tiles is not None:
        draw_tiling(path, max(found.tiles.reports, key=lambda r: r.plan.makespan_s).plan)
    else:
        raise UsageError(
            "--plot has no plan to draw, because neither stages nor tiles are possible; omit "
            "--plot to see why"
        )


def _plan_gemm(
    gemm: str,
    planner: TilePlanner,
    element: ElementBytes,
    devices: list[DeviceRates],
    ps: PsRates,
    plot: Path | None,
    *,
    tiles: bool,
    form: Form,
) -> None:
    from cleave.gemm import Gemm
    from cleave.planner.tiles.report import report
    from cleave_cli.render.plan import gemm_json, show_gemm
    from cleave_cli.render.plots import draw_tiling

    one = report(planner.plan(Gemm(*_sides(gemm)), element, devices), element, devices, ps)
    if form is Form.CSV:
        write_csv(gemm_json(one, devices, tiles=True)["tiles"])
    elif form is Form.JSON:
        typer.echo(json.dumps(gemm_json(one, devices, tiles=tiles)))
    else:
        show_gemm(one, len(devices))
    if plot is not None:
        draw_tiling(plot, one.plan)


def _sides(text: str) -> tuple[int, int, int]:
    parts = text.replace("x", ",").split(",")
    try:
        m, n, k = (int(part) for part in parts)
    except ValueError:
        raise UsageError(f"--gemm is {text!r}; use M,N,K, such as 4096,4096,4096") from None
    for name, side in (("M", m), ("N", n), ("K", k)):
        if not 1 <= side <= _MOST_SIDE:
            raise UsageError(f"{name} of --gemm must be between 1 and {_MOST_SIDE:,}, not {side}")
    return m, n, k
