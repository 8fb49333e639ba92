"""Compressed sends between the stages of ``torch.distributed.pipelining``, for pipelines over slow links.

``CompressedStage`` takes the place of torch's ``PipelineStage``, and ``prepare_schedule`` is called once on its
schedule. The guide is docs/pipelines.md.
"""

from yafsdp_cc.pipelining.embedding import TiedEmbedding as TiedEmbedding
from yafsdp_cc.pipelining.schedule import prepare_schedule as prepare_schedule
from yafsdp_cc.pipelining.settings import BoundaryPlan as BoundaryPlan
from yafsdp_cc.pipelining.settings import StageCompression as StageCompression
from yafsdp_cc.pipelining.settings import plan_boundary as plan_boundary
from yafsdp_cc.pipelining.stage import CompressedShardedStage as CompressedShardedStage
from yafsdp_cc.pipelining.stage import CompressedStage as CompressedStage
from yafsdp_cc.pipelining.timeline import StageSeconds as StageSeconds
from yafsdp_cc.pipelining.timeline import measure_reduces as measure_reduces
from yafsdp_cc.pipelining.timeline import stages_to_compress as stages_to_compress
