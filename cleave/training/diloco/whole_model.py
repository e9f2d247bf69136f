"""Prepare a model that devices hold whole: its graphs, its arrays and its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from cleave import graph_names as names
from cleave.arrays import DType
from cleave.errors import UsageError
from cleave.graphs.calls import OutsideLayers
from cleave.graphs.exchange_graphs import clip_graph, estimate_graph, mixed_graph, zeros_graph
from cleave.graphs.graph_cache import GraphCache
from cleave.graphs.layer_parts import tensors_of
from cleave.graphs.model_graphs import model_graphs
from cleave.graphs.optimizer_graphs import squares_graph
from cleave.graphs.packed import vocabulary_of
from cleave.planner.local_updates import ExchangeKind, Rounds
from cleave.scheduler.rounds.work import LocalModel, MicroBatch
from cleave.scheduler.stages.arrays import StageArray
from cleave.scheduler.stages.resident import ResidentParameter
from cleave.scheduler.stages.work import LOSS_LAYER, Resident, StepWork, SumName
from cleave.training.data.batches import Batch, learned_tokens
from cleave.training.diloco.exchange import Exchange, peak_bytes, work_bytes
from cleave.training.loop.optimizer import UpdateRule
from cleave.training.stages.ps_passes import described_refusals
from cleave.training.stages.resident import coefficients, update_graph
from cleave.training.stages.stage_work import ModelWork, floats, indices

_FP32: Final = 4
MIXED: Final = 0.5  # share of its own weights in the mix from which a device continues
_LOGIT_COPIES: Final = 3  # logits, their softmax and their gradient


class WholeModel:
    """A model, its graphs and its arrays, for devices that each train the whole model.

    Args:
        model: a causal language model of transformers.
        batch: sequences per micro-batch.
        seq: tokens per sequence.
        dtype: dtype in which devices may compute matrix products.
        rule: kind and settings of the devices' optimizer.
        clip: largest norm of gradients; 0 for no clipping.
        rounds: how often and in which form weights are exchanged.
        progress: called with a description of each graph before its export.

    Attributes:
        work: the model for the scheduler.
        exchange: converts between weights and the arrays of an exchange.
        array_of: returns a tensor as an array in the wire format.
        tensors: the trained parameters, by their key in the scheduler's model.
        names: the trained parameters' names in the model, by the same key.
        elements: number of trained elements.
        moments: number of arrays for each trained parameter that a device keeps besides weights.
        fragments: the keys of the parameters that one round exchanges, for each fragment.

    Raises:
        LayerGraphError: if a part of the model cannot be exported.
        UsageError: if devices cannot train the model.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch: int,
        seq: int,
        dtype: DType,
        rule: UpdateRule,
        clip: float,
        rounds: Rounds,
        progress: Callable[[str], None],
    ) -> None:
        self._rule, self._clip = rule, clip
        graphs = model_graphs(model.train(), seq, GraphCache.of_user(), progress=progress)
        if said := described_refusals(graphs):
            raise UsageError(f"devices cannot train this model alone: {said}; use --method stages")
        work = ModelWork(model, graphs, dtype)
        ids = torch.arange(batch * seq).reshape(batch, seq) % vocabulary_of(model)
        held = tensors_of(model)
        keys = {
            (number, name): work.held(number)[name]
            for number, layer in enumerate(graphs.layers)
            for name in layer.trainable
        }
        assert graphs.loss is not None
        outside = dict.fromkeys((*work.embedding_graphs.trainable, *graphs.loss.trainable))
        keys |= {(LOSS_LAYER, name): held[name] for name in outside}
        self.tensors: Mapping[SumName, Tensor] = keys
        known = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self.names = {key: known[id(tensor)] for key, tensor in keys.items()}
        if len(set(self.names.values())) < len(keys):
            raise UsageError(
                "this model uses a layer's weights in several places, so devices cannot train it "
                "alone; use --method stages"
            )
        if left := sorted(set(known.values()) - set(self.names.values())):
            raise UsageError(f"devices cannot train {left[0]} alone; use --method stages")
        self.fragments = _fragments(keys, rounds.fragments)
        self._decays = list(dict.fromkeys(map(rule.decay_of, keys.values())))
        resident = {key: self._parameter(work, tensor) for key, tensor in keys.items()}
        work.resident = {id(keys[key]): one for key, one in resident.items()}
        with torch.no_grad():
            layers = work.layers([OutsideLayers(model, graphs.calls).embed(ids)])
        loss = work.loss([], 1.0)
        loss = replace(
            loss, parameters={n: a for n, a in loss.parameters.items() if n != names.SCALE}
        )
        exchange = rounds.exchange
        self.exchange = Exchange(exchange, work.graph, work.array_of)
        self.array_of = work.array_of
        width, tokens = graphs.calls[0].x.shape[-1], batch * seq
        trained = _FP32 * sum(tensor.numel() for tensor in keys.values())
        frozen = sum(t.nbytes for t in held.values()) - trained
        self.elements = trained // _FP32
        self.moments = len(next(iter(resident.values())).moments)
        self.moments += exchange is ExchangeKind.SPARSE  # what a device has not returned
        logits = _LOGIT_COPIES * _FP32 * tokens * vocabulary_of(model)
        inputs = _FP32 * tokens * width * (len(layers) + 2)
        largest = max(tensor.numel() for tensor in keys.values())
        update = work.graph(update_graph(rule))
        given = dict.fromkeys(update.inputs, largest)
        scalars = given[names.SCALARS] = self.scalars(0.0, 0)[0].columns
        # The largest parameter is updated last, when the other gradients are gone.
        updating = _FP32 * largest * (1 + len(update.outputs)) + peak_bytes(update, given)
        works = {key: self.exchange.work(one.weight) for key, one in resident.items()}
        # Differences, and the messages that contain them, while steps run.
        most_returned = max(sum(work_bytes(works[key]) for key in each) for each in self.fragments)
        passing = trained + logits + inputs + (most_returned if rounds.overlap else 0)
        exchanging = max(self.exchange.working_bytes(one.weight) for one in resident.values())
        self.work = LocalModel(
            step=StepWork(
                layers=layers,
                loss=loss,
                x=[],
                width=width,
                tokens=[tokens],
                stages=[],
                gradients="fp32",
                resident=Resident(resident, update, work.graph(squares_graph())),
            ),
            embedding=work.embedding(),
            exchange=works,
            zeros=work.graph(zeros_graph()),
            mixed=work.graph(mixed_graph(MIXED)) if rounds.overlap else None,
            clip=work.graph(clip_graph(scalars)) if clip else None,
            estimate=work.graph(estimate_graph(scalars)) if len(rule.moments) > 1 else None,
            held_bytes=(2 + self.moments) * trained + frozen,
            working_bytes=max(passing, updating, exchanging),
            activations_bytes=sum(sum(layer.activations.values()) for layer in layers) * batch,
        )

    def _parameter(self, work: ModelWork, tensor: Tensor) -> ResidentParameter:
        weight = work.array_of(tensor, DType.FP32)
        count = len(self._rule.moments)
        # Devices make their own moments, so these arrays have no payload.
        moments = (StageArray(weight.rows, weight.columns, "fp32", b"") for _ in range(count))
        group = self._decays.index(self._rule.decay_of(tensor))
        return ResidentParameter(weight, tuple(moments), group)

    def scalars(self, rate: float, updates: float) -> list[StageArray]:
        """Return the coefficients of a local step's updates, by group.

        Args:
            rate: the inner learning rate.
            updates: number of updates that the device's moments have seen; infinite if they need
                no bias correction.
        """
        clip = self._clip or 1.0  # `clip_graph` replaces the largest norm by a factor
        return [coefficients(self._rule, decay, rate, clip, updates + 1) for decay in self._decays]

    @staticmethod
    def micro_batches(batches: list[Batch]) -> list[MicroBatch]:
        """Return the micro-batches of one local step."""
        learned = sum(learned_tokens(batch.labels) for batch in batches)
        scale = torch.full((1, 1), 1 / learned)
        return [
            MicroBatch(indices(b.ids), indices(b.labels), floats(scale.numpy()), b.ids.numel())
            for b in batches
        ]


def _fragments(keys: Mapping[SumName, Tensor], count: int) -> list[list[SumName]]:
    """Divide the parameters into fragments, with the layers in turns.

    Parameters outside the layers belong to the fragment that is smallest so far.

    Raises:
        UsageError: if there are more fragments than layers.
    """
    layers = len({layer for layer, _ in keys if layer != LOSS_LAYER})
    if count > layers:
        raise UsageError(
            f"--fragments is {count}, but the model has only {layers} layers; use at most that many"
        )
    found: list[list[SumName]] = [[] for _ in range(count)]
    for key in keys:
        if key[0] != LOSS_LAYER:
            found[key[0] % count].append(key)
    for key in (key for key in keys if key[0] == LOSS_LAYER):
        min(found, key=lambda each: sum(keys[one].numel() for one in each)).append(key)
    return found
