"""Tells megatron-core which layers of a model each virtual stage of a rank holds.

It knows how many layers each stage has, but not their contents or any process group.
"""

from __future__ import annotations

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mrlhf.parallel.stages import Stages


class LayerNumbers(PipelineParallelLayerLayout):
    """megatron-core's list of the layers of each stage, for one pipeline rank.

    megatron-core takes the rank's place from the one set of process groups that a process has
    there; our roles have different layouts.
    """

    def __init__(self, stages: Stages, rank: int, num_layers: int) -> None:
        counts = stages.split(num_layers)
        assert counts is not None, f"{num_layers} layers do not fit {stages}"
        listed = [["decoder"] * count for count in counts]
        listed[0].insert(0, "embedding")
        listed[-1].append("loss")
        super().__init__(listed, stages.pp)

        self._stages = stages
        self._numbers = stages.numbers_on(rank)
        self._num_layers = num_layers

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Return the number of layers before the first layer of virtual stage `vp_stage`."""
        assert layer_type is LayerType.decoder and pp_rank is None
        return self._stages.layers(self._numbers[vp_stage or 0], self._num_layers).start
