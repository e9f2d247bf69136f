"""The training loop: trains, evaluates and writes checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from cleave.errors import CleaveError, FleetError, UsageError
from cleave.fleet.local_fallback import AbandonedError, FleetPresence
from cleave.fleet.selection import Kept
from cleave.graphs.packed import PackedBy, called_with, mask_for, packed_by
from cleave.planner.plan import Method, StateMode
from cleave.scheduler.counters import FleetCounters
from cleave.training.data.batches import (
    IGNORED,
    Batch,
    BatchLoader,
    LoaderState,
    learned_tokens,
    validation_batches,
)
from cleave.training.diloco.local_updates import INNER, LocalUpdates, local_updates
from cleave.training.loop.checkpoint import (
    WEIGHTS,
    LoadedCheckpoint,
    remove_checkpoints,
    save_checkpoint,
)
from cleave.training.loop.context import TrainContext
from cleave.training.loop.disk import Patience
from cleave.training.loop.dropout import Chance
from cleave.training.loop.finite import DivergedError, check_loss, first_not_finite
from cleave.training.loop.inputs import (
    FINGERPRINTS,
    Dataset,
)
from cleave.training.loop.job import (
    Decay,
    FallbackMode,
    JobSpec,
    MemoryMode,
    Packing,
    Precision,
    default_learning_rate,
)
from cleave.training.loop.job_fleet import JobFleet
from cleave.training.loop.journal import Journal, JournalCounters, discard
from cleave.training.loop.losses import ComparedRun, HeldOut, losses_of
from cleave.training.loop.optimizer import LOSS_SCALE, LossScale, Optimizer, Schedule, update_rule
from cleave.training.loop.ps_memory import check_memory, memory_mode
from cleave.training.loop.records import (
    DoneRecord,
    EvalRecord,
    PresenceRecord,
    Record,
    SampleRecord,
    StartRecord,
    StepRecord,
    TextRecord,
    to_dict,
)
from cleave.training.loop.resident_files import Logged, ResidentFiles
from cleave.training.loop.run_folder import (
    BEST,
    CHECKPOINTS,
    JOURNAL,
    LOG,
    RunFolder,
    held_steps,
)
from cleave.training.loop.state_files import StateFiles
from cleave.training.loop.trackers import Trackers
from cleave.training.lora.adapters import (
    FROZEN,
    check_frozen,
    fixed_tensors,
    frozen_digest,
    load_trained,
    trained_parameters,
)
from cleave.training.lora.spec import LEARNING_RATE
from cleave.training.results.trained import in_training
from cleave.training.results.uses import Generation
from cleave.training.servers.shared_steps import SharedSteps
from cleave.training.servers.shared_weights import SharedWeights
from cleave.training.stages.replay_audits import RolledBackError
from cleave.training.stages.resident import StateStorage
from cleave.training.stages.staged import NotByStages
from cleave.training.stages.step_log import LogFolder
from cleave.training.tiles.offload import hold_weights
from cleave.training.tiles.offloaded_linear import auxiliary_weight
from cleave.workload.build import enable_checkpointing
from cleave.workload.registry import ModelSpec

_NARROW: Final = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_ALL: Final = 2**31  # value of `keep` that keeps all checkpoints
_SAMPLE_TOKENS: Final = 60
_MANY_EPOCHS: Final = 3  # passes over the data from which a note says how many there will be


class Trainer:
    """The training loop of one run: steps, evaluations, checkpoints and records.

    Args:
        base: the step of the checkpoint from which the run resumes; None without a checkpoint.
        layer_files: files for the weights and optimizer state of layers that devices train; None to
            keep them in memory.
    """

    def __init__(
        self,
        job: JobSpec,
        spec: ModelSpec,
        model: nn.Module,
        dataset: Dataset,
        run: RunFolder,
        context: TrainContext,
        base: int | None = None,
        layer_files: StateFiles | None = None,
    ) -> None:
        self.step = 0
        self.job = job
        self.context = context
        self.patience = context.patience(lambda: self.step)
        self.ranks = context.ranks
        if job.state != StateMode.SERVER.value and self.ranks.count > 1:
            raise UsageError(
                f"--state {job.state} supports only one server, but this run has "
                f"{self.ranks.count}; use --state server"
            )
        self.chance = Chance.of(model, job.seed)
        memory = memory_mode(job, model, self.ranks.count)
        sharded = MemoryMode.SHARDED.value
        # If one server needs sharded weights, all servers shard the weights.
        if sharded in self.ranks.agree(memory.value):
            memory = MemoryMode.SHARDED
        elif job.method in (Method.STAGES.value, Method.DILOCO.value):  # devices run all passes
            memory = MemoryMode.PLAIN
        self.weights = SharedWeights(model, self.ranks) if memory is MemoryMode.SHARDED else None
        if self.weights is not None and job.sample_every:
            self.context.note("no samples are drawn, because no server has all sharded weights")
        self._shares = False  # set once the weights are loaded and sharded
        again = memory is not MemoryMode.PLAIN
        if again:
            enable_checkpointing(model)
        # With gradient accumulation, all gradients stay in memory until the last micro-batch.
        in_backward = memory is MemoryMode.LEAN and job.accumulate == 1
        here = context.fleet is None or job.method in (Method.LOCAL.value, Method.TILES.value)
        if in_backward and job.clip and here:
            self.context.note(
                f"to save memory, each backward pass runs twice, because --clip {job.clip:g} needs "
                "the norm of all gradients first; to avoid this, use --clip 0, or --memory "
                "recompute if the gradients fit in memory (--state-dir saves memory)"
            )
        self.journal = _open_journal(job, run, context, base or 0, self.patience)
        on_devices = context.fleet is not None and job.state != StateMode.SERVER.value
        self._resident: ResidentFiles | None = None
        if on_devices and job.interval:
            self._resident = ResidentFiles(run.path, base, context.note)
        self._layer_files = layer_files
        self._logged = Logged()
        separate = job.packing == Packing.SEPARATE.value
        self._packed = packed_by(model) if separate else None
        self._auxiliary = auxiliary_weight(model)
        if self._auxiliary:
            _check_auxiliary(job, self._packed)
        self.fleet: JobFleet | None = None
        self.rounds: LocalUpdates | None = None
        if job.method == Method.DILOCO.value:
            self.rounds = local_updates(job, model, context, self._presence)
        elif context.fleet is not None and job.method != Method.LOCAL.value:
            self.fleet = JobFleet(
                job,
                spec,
                model,
                context.fleet,
                self.journal,
                checkpointing=again,
                clock=context.clock,
                stop=lambda: context.stop() or self.shared.deserted(),
                note=context.note,
                presence=self._presence,
                stuck=self._stuck,
                applied=lambda: self.optimizer.applied,
                packed=self._packed,
                by_tiles=self.weights is not None or self._auxiliary > 0,
            )
        self.shared = SharedSteps(self.ranks, self.fleet, context.clock, self.context.note)
        self.model = model.train()
        self._frozen = frozen_digest(model)
        self.corpus = dataset.corpus
        self.tokenizer = dataset.tokenizer
        self.fingerprints = dataset.fingerprints
        self.folder = run
        self.trackers = Trackers({}, self.context.note)
        self.saved: int | None = None  # step of the last checkpoint
        self.in_checkpoints = True  # whether checkpoint `saved` is in the folder of checkpoints
        self.saved_s = context.clock()
        # the last checkpoint that a thread has written from a snapshot
        self._from_snapshot: tuple[int, Path] | None = None
        self.heldout = HeldOut()
        self.kept_loss = math.inf  # held-out loss of the checkpoint in best/
        self.compared = ComparedRun()
        self.loader = BatchLoader(
            self.corpus.train,
            batch=job.batch,
            seq=job.seq,
            seed=job.seed,
            separate=self._packed is not None,
        )
        self.optimizer = Optimizer(
            model,
            update_rule(job),
            clip=job.clip,
            in_backward=in_backward,
            files=self._state_files(),
            scale=LossScale() if job.dtype == Precision.FP16.value else None,
            ranks=self.ranks,
            weights=self.weights,
        )
        usual = min(100, max(1, job.steps // 10))
        warmup = job.warmup_steps if job.warmup_steps >= 0 else usual
        peak = job.learning_rate or (LEARNING_RATE if job.lora else default_learning_rate(spec))
        decay = job.decay_steps if job.decay_steps >= 0 else max(1, job.steps // 10)
        self._began = False  # whether a step has begun, so that `restore` is no longer called
        self._checked_alone = False  # whether this server has the memory for steps without stages
        # Counters before weights were sent early for the next step, whose record counts the bytes.
        self._early: FleetCounters | None = None
        # Positions in the data by step, for all steps to which the run may go back.
        self._data = {self.step: self.loader.state()}
        self.schedule = Schedule(peak, warmup, job.steps, Decay(job.schedule), job.floor, decay)

    def _state_files(self) -> StateFiles | None:
        if not self.job.state_dir:
            return None
        own = f"server-{self.ranks.rank + 1}" if self.ranks.count > 1 else ""
        return StateFiles(Path(self.job.state_dir) / own, self.patience)

    def write(self, write: Callable[[], object]) -> None:
        """Call `write` on rank 0 to write to the run folder, and retry while the disk is full."""
        if not self.ranks.rank:
            self.patience.insist(write)

    def close(self) -> None:
        """Cancel the fleet's tasks in flight and close the journal and the trackers."""
        if self.fleet is not None:
            self.fleet.close()
        if self.rounds is not None:
            self.rounds.close()
        if self.journal is not None:
            self.journal.close()
        if self._resident is not None:
            self._resident.close()
        self.trackers.close()

    def run(self) -> DoneRecord:
        """Run all remaining steps, then report and return the last record of the run."""
        self._share_weights()
        job, note = self.job, self.context.note
        where = str(self.folder.path)
        if not self.ranks.rank:
            self.context.report(StartRecord(self._recorded, job.steps, where, job.method))
            self.trackers = Trackers.open(job, self.folder, self.step, note)
            try:
                self.compared = ComparedRun.of(job, note)
            except CleaveError as error:  # the folder of the compared run may no longer exist
                note(f"not compared: {error}")
        per_step = job.batch * job.accumulate
        if (epochs := job.steps * per_step / len(self.loader)) >= _MANY_EPOCHS:
            note(
                f"{job.steps:,} steps of {per_step:,} sequences read the data's "
                f"{len(self.loader):,} sequences {epochs:,.0f} times"
            )
        if self.fleet is not None and self.step < job.steps:
            note(f"step {self.step + 1} begins; the first step of a run takes longest")
        if self.journal is not None and self.journal.held:
            note(f"the journal holds {self.journal.held} products computed since that checkpoint")
        if self.step >= job.steps:
            note(f"the run is already at step {self.step} of {job.steps}; increase --steps")
            if self.ranks.agree(self._checkpoint_due(stopped=False))[0]:
                self.save()  # until now, only `ResidentFiles` had this checkpoint
        began_s, first = time.perf_counter(), self._counters()
        resumed_after = self._recorded
        first_loss = loss = math.nan
        tokens, deserted = 0, -1
        stopped = False
        while self.step < job.steps and not stopped:
            try:
                record = self.train_step()
                # Until step `recorded`, this server only repeats its part of logged steps.
                if self.step < self._logged.recorded:
                    continue
                loss = record.loss
                first_loss = loss if math.isnan(first_loss) else first_loss
                if is_new := self.step > self._logged.recorded:
                    self._report(record)
                    tokens += record.tokens
                if self.step == job.steps and self.fleet is not None:
                    self.fleet.settle()
                if self._evaluates_after(self.step) and (is_new or not self._logged.judged):
                    self._judge(self.evaluate())
                if self._samples_after(self.step) and is_new:
                    self._sample()
            except RolledBackError as error:
                self._go_back(error.steps)
            except AbandonedError:
                if self.context.stop():
                    note(f"stopping after step {self.step}, without waiting for devices")
                elif self.step != deserted:
                    deserted = self.step
                    note("a server has no device left; the others compute its part of the step")
            ends = any(self.ranks.agree(self.context.stop() or self._has_stalled()))
            stopped = self.step < job.steps and ends
            if self.ranks.agree(self._checkpoint_due(stopped=stopped))[0]:
                self.save()
            elif (journal := self.journal) is not None:
                size_bytes = sum(tensor.nbytes for tensor in self._tensors().values())
                if any(self.ranks.agree(journal.outgrown(size_bytes))):
                    before_s = self.context.clock() - self.patience.waited_s
                    self.save()
                    after_s = self.context.clock() - self.patience.waited_s
                    journal.counters.spent_s += after_s - before_s
        if not stopped:
            self._sync()
        if text := self.compared.found(job.against):
            note(text)
        kept = self.fleet.kept() if self.fleet else Kept(0, 0, 0.0, ())
        done = DoneRecord(
            steps=self.step,
            first_loss=first_loss,
            loss=loss,
            tokens=tokens,
            wall_s=time.perf_counter() - began_s,
            run_folder=where,
            stopped=stopped,
            offload=job.offload,
            gemms=kept.total,
            kept_gemms=kept.gemms,
            kept_saves_s=kept.saves_s,
            kept_reasons=kept.reasons,
            journal_gemms=self.journal.counters.taken if self.journal else 0,
            resumed_after=resumed_after,
            **self._work(self.shared.counted(self._counters() - first), JournalCounters()),
        )
        self._report(done)
        self.write(self.folder.plot)
        return done

    def _work(self, spent: FleetCounters, before: JournalCounters) -> dict[str, Any]:
        """Return the fields of a record that measure the work of the fleet and the journal."""
        journal = self._journal_counters()
        return {
            "clock": self.context.fleet.clock if self.context.fleet else "wall",
            "fleet_s": spent.fleet_s,
            "downlink_bytes": spent.downlink_bytes,
            "uplink_bytes": spent.uplink_bytes,
            "tiles": spent.tiles,
            "blocks": spent.blocks,
            "reissued": spent.reissued,
            "local_gemms": spent.local_gemms,
            "traffic": spent.traffic,
            "saved": spent.saved,
            "journal_bytes": journal.written_bytes - before.written_bytes,
            "journal_s": journal.spent_s - before.spent_s,
            "journal_saved_s": journal.saved_s - before.saved_s,
        }

    def train_step(self) -> StepRecord:
        """Run one optimizer step and return its record.

        Raises:
            AbandonedError: if training stops during the step, or if one of several servers has lost
                all its devices. The next call repeats the step with the same batches.
            RolledBackError: if an audit found a wrong result of an earlier step; see `_go_back`.
            DivergedError: if the loss or the gradients are not finite.
        """
        if self.rounds is not None:
            return self._train_round(self.rounds)
        before, began_s = self._early or self._counters(), time.perf_counter()
        self._early = None
        journal_before, update_before_s = self._journal_counters(), self.optimizer.update_s
        if self.journal is not None:
            self.journal.begin(self.step)
        if self.fleet is not None and not self._began:
            log = self._resident.log if self._resident is not None else self.folder.path
            files, stored = self._layer_files, self._logged.steps
            storage = StateStorage(log, files, self.step, stored, self._state_changes)
            self.fleet.keep_on_devices(self.optimizer, storage)
            self._keep_resident()
        self._began = True
        rate, factor = self.schedule.rate(self.step), self._factor
        oldest = self.step - (self.fleet.undoable if self.fleet is not None else 0)
        self._data = {step: held for step, held in self._data.items() if step >= oldest}
        batches = [self.loader.next_batch() for _ in range(self.job.accumulate)]
        try:
            with self.fleet.counting_tasks() if self.fleet else nullcontext():
                loss = self._update(rate, batches)
        except AbandonedError:
            self.loader.restore(self._data[self.step])
            self.optimizer.forget_gradients()
            raise
        except DivergedError as error:
            raise self._diverged(f"in step {self.step + 1}", str(error)) from error
        wall_s = time.perf_counter() - began_s
        spent = self.shared.counted((self._early or self._counters()) - before)
        if self.journal is not None:
            self.journal.end()
        self.step += 1
        self._data[self.step] = self.loader.state()
        self._keep_resident()
        if self._factor < factor:
            self.context.note(
                f"step {self.step} changed no weights, because its gradients overflow in fp16; the "
                f"loss scale is now {self._factor:g}"
            )
        work = self._work(spent, journal_before)
        updated_s = self.optimizer.update_s - update_before_s
        method = _method(spent, from_journal=work["journal_saved_s"] > 0)
        # With several servers, `spent` contains the times of all of them.
        if self.fleet is not None and method is Method.STAGES and not self.shared.several:
            self.fleet.learn(wall_s - spent.planning_s, updated_s)
        return StepRecord(
            step=self.step,
            loss=loss,
            tokens=self.job.batch * self.job.seq * self.job.accumulate,
            learning_rate=rate,
            wall_s=wall_s,
            ended_s=time.time(),
            ps_s=wall_s - spent.waited_s,
            method=method.value,
            predicted_s=spent.predicted_s,
            planning_s=spent.planning_s,
            audit_s=spent.audit_s,
            loss_s=spent.loss_s,
            sums_s=spent.sums_s,
            optimizer_s=updated_s,
            devices=self.fleet.used if self.fleet and method is Method.STAGES else (),
            verify_s=spent.verify_s,
            floor_bytes=spent.floor_down_bytes + spent.floor_up_bytes,
            against_loss=self.compared.against(self.step, loss),
            **work,
        )

    def _train_round(self, rounds: LocalUpdates) -> StepRecord:
        """Run a round of local updates, and return the record of its last step."""
        before, began_s = self._counters(), time.perf_counter()

        def batches() -> list[Batch]:
            return [self.loader.next_batch() for _ in range(self.job.accumulate)]

        def rate(step: int) -> float:
            return self.schedule.rate(self.step + step)

        try:
            done = rounds.round(rate, batches)
        except AbandonedError:
            self.loader.restore(self._data[self.step])
            raise
        except DivergedError as error:
            raise self._diverged(f"in the round after step {self.step}", str(error)) from error
        self.step += rounds.steps
        self._data = {self.step: self.loader.state()}
        wall_s, spent = time.perf_counter() - began_s, self._counters() - before
        return StepRecord(
            step=self.step,
            loss=done.loss,
            tokens=done.tokens,
            learning_rate=self.schedule.rate(self.step - 1),
            wall_s=wall_s,
            ended_s=time.time(),
            ps_s=wall_s - spent.waited_s,
            method=Method.DILOCO.value,
            verify_s=0.0,
            floor_bytes=0,
            against_loss=self.compared.against(self.step, done.loss),
            **self._work(spent, self._journal_counters()),
        )

    def _go_back(self, steps: int) -> None:
        """Go back by `steps` steps, which are undone because a device returned a wrong result.

        Checkpoints and records of these steps are removed, because they depend on that result.
        """
        self.step -= steps
        self.loader.restore(self._data[self.step])
        self.optimizer.forget_gradients()
        self._early = None
        self.context.note(f"going back to step {self.step}, the last one without falsified results")
        if self._resident is not None:
            self._resident.begin_again()
            self._note_from_snapshot()
        if (self.saved or 0) > self.step:
            self._save(CHECKPOINTS, keep=_ALL)
            remove_checkpoints(self.folder.path / CHECKPOINTS, lambda step: step > self.step)
            self.saved = self.step
        self._keep_resident()
        self.wind_back(comparable=True, log=False)

    def _diverged(self, when: str, found: str) -> DivergedError:
        """Return the error for a diverged run. `when` is a phrase such as "in step 3"."""
        clip = f"now {self.job.clip:g}" if self.job.clip else "now off"
        return DivergedError(
            f"the run diverged {when}: {found}; checkpoints are not affected; start a new run with "
            f"a lower --learning-rate (now {self.schedule.peak:g}), with --clip ({clip}), or with "
            "more --warmup-steps"
        )

    def _update(self, rate: float, batches: list[Batch]) -> float:
        """Compute gradients, update the parameters, and return the mean loss of the step."""
        learned = sum(learned_tokens(batch.labels) for batch in batches)
        if self.shared.several:
            part = self.shared.part(batches)
            return self.optimizer.step(rate, lambda: self._shared_gradients(part, learned))
        if (fleet := self.fleet) is not None:
            loss = self.optimizer.step_whole(rate, lambda: fleet.gradients(batches), self._updated)
            if not isinstance(loss, NotByStages):
                return loss
            if self.optimizer.on_devices is not None:  # this server's weights are not current
                raise FleetError(f"the step cannot be computed: {loss.reason}")
        return self.optimizer.step(rate, lambda: self._backward(batches, learned))

    def _keep_resident(self) -> None:
        """If devices keep state, write the files from which a killed server resumes here."""
        files, state = self._resident, self.fleet.resident if self.fleet is not None else None
        if files is None or state is None:
            return
        self._note_from_snapshot()
        interval, since_s = self.job.interval, self.context.clock() - self.saved_s
        due = interval.seconds and interval.due(self.step, since_s)
        save = self._save_snapshot if due and state.position > (self.saved or 0) else None
        if files.follow(self.step, state, self._tensors(), self._meta(), save):
            self.saved_s = self.context.clock()

    def _save_snapshot(
        self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint of a snapshot. This runs in the thread of `ResidentFiles`."""
        path = save_checkpoint(
            self.folder.path / CHECKPOINTS,
            step=step,
            tensors=tensors,
            meta=meta,
            keep=self.job.save_total_limit,
            sound_before=self.heldout.sound_before,
        )
        self._from_snapshot = step, path

    def _note_from_snapshot(self) -> None:
        found, self._from_snapshot = self._from_snapshot, None
        if found is not None:
            self._saved(*found)

    def _state_changes(self, layers: bool) -> None:
        if self._resident is not None:
            self._keep_resident()  # with `--state auto`, the devices have the state only now
            self._resident.wait(layers=layers)

    def _updated(self, parameter: Tensor) -> None:
        """Send an updated parameter to devices if the next step follows without an evaluation."""
        done = self.step + 1
        pauses = done == self.job.steps or self._evaluates_after(done) or self.context.stop()
        if self.fleet is not None and not pauses:
            self._early = self._early or self._counters()
            self.fleet.updated(parameter)

    def _evaluates_after(self, step: int) -> bool:
        job = self.job
        return bool(job.eval_every) and (step % job.eval_every == 0 or step == job.steps)

    def _samples_after(self, step: int) -> bool:
        every = self.job.sample_every
        return bool(every) and (step % every == 0 or step == self.job.steps)

    def _sample(self) -> None:
        """Generate a sample from the job's prompt on the PS, and report it."""
        self._sync()
        if self.ranks.rank or self.weights is not None:  # no server has all sharded weights
            return
        chat, stop, parts = self.tokenizer.has_template, self.context.stop, list[str]()

        def told(record: Record) -> None:
            if isinstance(record, TextRecord):
                parts.append(record.text)

        plainly = self.fleet.plainly() if self.fleet is not None else nullcontext()
        with plainly, in_training(self.model, self.folder, self.tokenizer) as trained:
            tokens = min(_SAMPLE_TOKENS, trained.most_tokens // 2)
            try:
                Generation(self.job.prompt, chat, tokens=tokens).run(trained, told, stop)
            except UsageError as error:
                self.context.note(f"no sample after step {self.step}: {error}")
                return
        text = "".join(parts if chat else parts[1:])  # a continuation begins with the prompt
        self._report(SampleRecord(self.step, self.job.prompt, text))

    def _shared_gradients(self, part: list[Batch], learned: int) -> float:
        """Compute the gradients of this server's micro-batches and sum them over all servers.

        Return the mean loss of the step over its `learned` learned tokens.
        """
        if self.weights is not None:
            self.optimizer.begin_passes(max(self.ranks.agree(len(part))))
        return self.shared.do(part, partial(self._gradients, part, learned), self.optimizer)

    def _gradients(self, batches: list[Batch], learned: int) -> float:
        """Compute the gradients of `batches` by stages if possible, otherwise with `_backward`.

        Return the contribution of `batches` to the step's mean loss.
        """
        if self.fleet is None:
            return self._backward(batches, learned)
        loss = self.fleet.gradients(batches, learned)
        return self._backward(batches, learned) if isinstance(loss, NotByStages) else loss

    def _backward(self, batches: list[Batch], learned: int) -> float:
        """Run the forward and backward passes of `batches`, which are this server's part of a step.

        Return the part's contribution to the mean loss over the step's `learned` learned tokens.
        """
        if self.fleet is not None and not self._checked_alone:
            check_memory(self.job, self.ranks.count, alone=True)
            self._checked_alone = True
        total, first = 0.0, self.shared.first_row
        with hold_weights(self.model) if len(batches) > 1 else nullcontext():
            for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
                count = len(batch.ids)
                with self._gathered(left), self.chance.of_pass(self.step, first, count):
                    loss = self._loss(batch) / (learned / learned_tokens(batch.labels))
                    if self.optimizer.in_backward:  # the backward pass will update parameters
                        check_loss(loss.item())
                    with self.optimizer.last_pass() if not left else nullcontext():
                        (loss * self._factor).backward()  # type: ignore[no-untyped-call]
                total += loss.item()
                first += count
        return total

    def _gathered(self, left: int) -> AbstractContextManager[None]:
        """Return a context manager that gathers sharded weights for one pass.

        `left` is the number of this server's passes that follow.
        """
        return self.weights.computing(left) if self.weights is not None else nullcontext()

    @property
    def _factor(self) -> float:
        """Return the current loss scale; 1 without loss scaling."""
        return self.optimizer.scale.factor if self.optimizer.scale is not None else 1.0

    def _loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy over a batch's learned tokens.

        In training mode, add the auxiliary loss of a mixture of experts.
        """
        narrow = _NARROW.get(Precision(self.job.dtype))
        kept = self.weights is None  # do not cache casts of sharded weights, which are freed
        with torch.autocast("cpu", narrow, enabled=narrow is not None, cache_enabled=kept):
            mask = mask_for(self._packed, batch.positions)
            out = self.model(**called_with(batch.ids, mask, batch.positions))
        loss = nn.functional.cross_entropy(
            out.logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED
        )
        spreads = self._auxiliary and self.model.training
        return loss + self._auxiliary * out.aux_loss if spreads else loss

    def evaluate(self) -> float:
        """Return the mean loss on the validation split, in nats per learned token."""
        self.model.eval()
        try:
            with torch.no_grad():
                sums = self._held_out_sums()
                while sums is None:  # a server lost its devices: redistribute the batches
                    sums = self._held_out_sums()
        finally:
            self.model.train()
        return sum(total for total, _ in sums) / sum(learned for _, learned in sums)

    def _held_out_sums(self) -> list[tuple[float, int]] | None:
        """Evaluate the held-out batches. Return each server's loss sum and token count.

        Return None if a server lost all its devices. Raise AbandonedError if training stops.
        """
        job = self.job
        found = validation_batches(
            self.corpus.validation,
            job.batch,
            job.seq,
            job.eval_batches,
            separate=self._packed is not None,
        )
        batches = list(islice(found, *self.shared.turns()))
        passes = max(self.ranks.agree(len(batches)))
        try:
            return self.shared.together(partial(self._summed, batches, passes))
        except AbandonedError:
            if any(self.ranks.agree(self.context.stop())) or not self.shared.several:
                raise
            return None

    def _summed(self, batches: Sequence[Batch], passes: int) -> tuple[float, int]:
        """Return the summed loss of the learned tokens in `batches`, and the number of tokens."""
        found = self.fleet.evaluate(batches) if self.fleet is not None else None
        if found is not None:
            return found
        self._sync()
        total, learned = 0.0, 0
        with self.weights.evaluating(passes) if self.weights is not None else nullcontext():
            for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
                count = learned_tokens(batch.labels)
                with self._gathered(left):
                    loss = self._loss(batch).item()
                total += loss * count if count else 0.0  # the mean of no tokens is NaN
                learned += count
        return total, learned

    def _sync(self) -> None:
        """Fetch the weights and optimizer state that are on devices, if any."""
        if self.fleet is not None:
            self.fleet.sync()

    def _checkpoint_due(self, *, stopped: bool) -> bool:
        interval = self.job.interval
        if not interval or (self.saved == self.step and self.in_checkpoints):
            return False
        if stopped or self.step >= self.job.steps:
            return True
        if interval.seconds and self.fleet is not None and self.fleet.resident is not None:
            return False  # `_keep_resident` makes checkpoints, so that devices need not stop
        return interval.due(self.step, self.context.clock() - self.saved_s)

    def save(self) -> None:
        """Write a checkpoint to resume from: weights, optimizer state and position in the data."""
        if self.rounds is not None:
            self.rounds.collect()
        try:
            self._sync()
        except AbandonedError:
            self.context.note(
                f"step {self.step} has no checkpoint, because its weights are on devices, and no "
                "connected device can return them"
            )
            return
        if self._resident is not None:
            self._resident.wait()  # the thread may be writing a checkpoint, too
        self._saved(self.step, self._save(CHECKPOINTS, self.job.save_total_limit))
        self.saved_s = self.context.clock()
        if self.journal is not None:
            self.journal.covered(self.step)
        if self._resident is not None:
            self._resident.covered(self.step)

    def _saved(self, step: int, path: Path | None) -> None:
        """Note that the checkpoint of a step is complete. `path` is None on other ranks."""
        if path is not None:
            self.context.note(f"checkpoint written to {path}")
        self.saved, self.in_checkpoints = step, True
        self._remove_old_best()

    def _save(self, name: str, keep: int) -> Path | None:
        """Write a checkpoint to the subfolder `name`. On rank 0, return its path.

        Raise DivergedError if a weight or optimizer state is not finite.
        """
        folder, meta, held = self.folder.path / name, self._meta(), self._tensors()
        if bad := next(filter(None, self.ranks.agree(first_not_finite(held))), None):
            raise self._diverged(f"in step {self.step}", f"{bad!r} is not finite")
        with self.ranks.collect(held) as collected:
            if collected is None:
                return None
            tensors, fetch = collected.tensors, collected.fetch
            return self.patience.insist(
                lambda: save_checkpoint(
                    folder,
                    step=self.step,
                    tensors=tensors,
                    meta=meta,
                    keep=keep,
                    sound_before=self.heldout.sound_before,
                    fetch=fetch,
                )
            )

    def _meta(self) -> dict[str, Any]:
        return {
            "job": self.job.to_dict(),
            FROZEN: self._frozen,
            FINGERPRINTS: asdict(self.fingerprints),
            "epoch": self._data[self.step].epoch,
            "position": self._data[self.step].position,
            **({INNER: self.rounds.meta()} if self.rounds is not None else {}),
            **({LOSS_SCALE: asdict(self.optimizer.scale)} if self.optimizer.scale else {}),
        }

    def _judge(self, loss: float) -> None:
        """Report a held-out loss. With `keep_best`, write a checkpoint after a new lowest loss."""
        self.heldout.lowest(loss, self.step)
        if self.heldout.sound_before == self.step:
            self.context.note(
                f"the held-out loss after step {self.step} is {loss}, so the run may have "
                "diverged; the checkpoint before that is kept until a held-out loss is finite again"
            )
        if self.job.keep_best and self.ranks.agree(loss < self.kept_loss)[0]:
            self._sync()
            self._save(BEST, keep=_ALL)
            self.kept_loss = loss
            self._remove_old_best()
        # Report this last, because a resumed run does not repeat an evaluation with a record.
        self._report(EvalRecord(self.step, loss))

    def _remove_old_best(self) -> None:
        """Keep only the newest best checkpoint and the newest one that a resumed run can keep.

        A killed run resumes from the last regular checkpoint and removes later best checkpoints.
        """
        if self.ranks.rank:
            return
        held = held_steps(self.folder.path / BEST)
        kept = {*held[:1], *[step for step in held if step <= (self.saved or 0)][:1]}
        remove_checkpoints(self.folder.path / BEST, lambda step: step not in kept)

    def _has_stalled(self) -> bool:
        most = self.job.early_stop
        if not most or self.heldout.since < most:
            return False
        self.context.note(
            f"stopping: the last {self.heldout.since} held-out losses are not below "
            f"{self.heldout.best:.4f}"
        )
        return True

    def _tensors(self) -> dict[str, Tensor]:
        """Return the weights and optimizer state that this server contributes to a checkpoint."""
        first = not self.ranks.rank
        weights = trained_parameters(self.model) if first or self.weights is not None else {}
        if self.weights is not None:
            weights = self.weights.owned(weights)
        if first and not self.job.lora:  # with adapters, the base model has the fixed tensors
            weights = {**weights, **fixed_tensors(self.model)}
        return {
            **{WEIGHTS + name: values for name, values in weights.items()},
            **(self.rounds.tensors() if self.rounds is not None else self.optimizer.tensors()),
        }

    def restore(
        self, checkpoint: LoadedCheckpoint, changed: Sequence[str], *, accept_changes: bool
    ) -> list[str]:
        """Load weights, optimizer state and the position in the data from a checkpoint.

        If the training text is among the `changed` inputs, the new text is read from its beginning.

        Returns:
            Names of further changed inputs: `FROZEN` if the frozen weights have changed.

        Raises:
            CleaveError: if the checkpoint belongs to another model, or if frozen weights have
                changed and `accept_changes` is False.
        """
        found: list[str] = []
        try:
            check_frozen(self.model, checkpoint.meta, self.job.model)
        except CleaveError:
            if not accept_changes:
                raise
            self.context.note("continuing with different frozen weights")
            found.append(FROZEN)
        load_trained(self.model, checkpoint.tensors, self.job.model)
        self._share_weights()  # free other servers' weights before optimizer state is allocated
        scale = self.optimizer.scale
        if checkpoint.step and scale is not None:
            scale.restore(checkpoint.meta.get(LOSS_SCALE))
        if self.rounds is not None:
            self.rounds.load(checkpoint.tensors, checkpoint.meta.get(INNER, []), checkpoint.step)
        # There is no optimizer state before the first update.
        elif scale.updates if scale is not None else checkpoint.step:
            self.optimizer.load_tensors(checkpoint.tensors)
        if "text" not in changed:
            self.loader.restore(LoaderState(checkpoint.meta["epoch"], checkpoint.meta["position"]))
        self._data = {checkpoint.step: self.loader.state()}
        self.step = self.saved = checkpoint.step
        return found

    def wind_back(self, *, comparable: bool, log: bool) -> None:
        """Remove the records and best checkpoints of steps that will be repeated.

        Args:
            comparable: whether to restore the lowest held-out loss from the remaining records.
            log: whether logged steps have the same settings and inputs.
        """
        self._find_logged(usable=log)
        done = self._recorded
        if not self.ranks.rank:
            if lost := self.patience.insist(lambda: self.folder.rewind(done)):
                several = f"steps {done + 1} to {lost} are" if lost > done + 1 else ""
                self.context.note(f"{several or f'step {lost} is'} repeated")
            remove_checkpoints(self.folder.path / BEST, lambda best: best > done)
        self.ranks.agree(None)  # wait for rank 0
        if comparable:
            self.heldout = HeldOut.of(self.folder.records(), done)
            losses = losses_of(self.folder.records(), done)
            best = held_steps(self.folder.path / BEST)
            self.kept_loss = losses.get(best[0], math.inf) if best else math.inf

    def _find_logged(self, *, usable: bool) -> None:
        """Find the steps that an earlier process logged after the checkpoint, and remove others."""
        self._logged = Logged()
        if self._resident is None or not usable:
            if not self.ranks.rank:
                LogFolder(self.folder.path / LOG).keep(range(0))
            return
        self.patience.insist(lambda: self.folder.rewind(_ALL))  # remove damaged lines
        rates = map(self.schedule.rate, range(self.step, self.job.steps))
        self._logged = self._resident.logged(self.step, rates, self.folder.records())
        if steps := len(self._logged.steps):
            self.context.note(
                f"the log contains the steps up to step {self.step + steps}; devices rebuild their "
                "state from it"
            )

    @property
    def _recorded(self) -> int:
        """Return the number of steps that this process has run or need not record."""
        return max(self.step, self._logged.recorded)

    def _share_weights(self) -> None:
        """If the servers shard the weights, free the weights that other servers own."""
        if self.weights is not None and not self._shares:
            self._shares = True
            self.weights.begin_sharing()

    def _counters(self) -> FleetCounters:
        if self.rounds is not None:
            return self.rounds.counters()
        return self.fleet.counters() if self.fleet else FleetCounters()

    def _journal_counters(self) -> JournalCounters:
        return replace(self.journal.counters) if self.journal else JournalCounters()

    def _stuck(self, reason: str) -> None:
        local = self.job.fallback == FallbackMode.LOCAL.value
        so = "the parameter server computes it" if local else "training waits"
        self.context.note(f"no device can compute a product, {so}: {reason}")

    def _presence(self, presence: FleetPresence) -> None:
        self._report(PresenceRecord(self.step + 1, presence.value, _PRESENCE[presence]))

    def _report(self, record: Record) -> None:
        if self.ranks.rank and not isinstance(record, PresenceRecord):
            return  # rank 0 reports this record
        self.write(lambda: self.folder.append(to_dict(record)))
        self.trackers.report(record)
        self.context.report(record)


_PRESENCE = {
    FleetPresence.PRESENT: "a device is connected; training continues",
    FleetPresence.ABSENT: "no device is connected; training waits for one",
    FleetPresence.LOCAL: "no device is connected; training continues on the parameter server",
}


def _method(spent: FleetCounters, *, from_journal: bool) -> Method:
    """Return how a step was computed.

    Args:
        spent: increase of the fleet's counters during the step.
        from_journal: whether GEMM results were read from the journal.
    """
    if spent.predicted_s:  # only completed steps by stages count
        return Method.STAGES
    return Method.TILES if spent.tiles or from_journal else Method.LOCAL


def _check_auxiliary(job: JobSpec, packed: PackedBy | None) -> None:
    """Raise UsageError if the settings do not support a mixture of experts' auxiliary loss."""
    asks = "the model's config asks for the auxiliary loss of experts (output_router_logits)"
    if job.method == Method.STAGES.value:
        raise UsageError(
            f"{asks}, which stages do not support; use --method tiles or local, or set "
            "output_router_logits to false"
        )
    if packed is PackedBy.MASK:
        raise UsageError(
            f"{asks}, which --packing separate does not support; omit --packing, or set "
            "output_router_logits to false"
        )


def _open_journal(
    job: JobSpec, run: RunFolder, context: TrainContext, base: int, patience: Patience
) -> Journal | None:
    rank = context.ranks.rank
    folder = run.path / (f"{JOURNAL}-{rank + 1}" if rank else JOURNAL)
    if not job.journal:
        discard(folder)
        return None
    if context.fleet is None:
        context.note("the journal is off, because this run has no fleet")
        return None
    return Journal(folder, base, say=context.note, clock=context.clock, patience=patience)
