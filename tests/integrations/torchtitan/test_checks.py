import pytest
import torch
from torch import nn

from loopscope.errors import ConfigError, UnsupportedError
from loopscope.integrations.torchtitan import configs
from loopscope.integrations.torchtitan.checks import check_config, check_model


def test_the_ready_configurations_pass():
    for make in (configs.debug, configs.wide):
        check_config(make())


@pytest.mark.parametrize(
    ("section", "name", "value", "flag"),
    [
        ("parallelism", "pipeline_parallel_degree", 2, "--parallelism.pipeline-parallel-degree is 2"),
        ("parallelism", "tensor_parallel_degree", 2, "--parallelism.tensor-parallel-degree is 2"),
        ("parallelism", "context_parallel_degree", 2, "--parallelism.context-parallel-degree is 2"),
        ("parallelism", "expert_parallel_degree", 2, "--parallelism.expert-parallel-degree is 2"),
        ("parallelism", "spmd_backend", "full_dtensor", "--parallelism.spmd-backend is full_dtensor"),
        ("training", "disable_cuda_graphs", False, "--training.disable-cuda-graphs"),
        ("debug", "spmd_typechecking", True, "--debug.spmd-typechecking is on"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_flag(section, name, value, flag):
    config = configs.debug()
    setattr(getattr(config, section), name, value)
    with pytest.raises(UnsupportedError) as caught:
        check_config(config)
    assert flag in str(caught.value)
    assert "expected" in str(caught.value)


def test_memory_budget_recompute_is_refused():
    from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC

    config = configs.debug()
    config.activation_checkpoint = MemoryBudgetAC.Config()
    with pytest.raises(UnsupportedError, match="memory-budget"):
        check_config(config)


def test_a_sequence_needs_two_tokens():
    config = configs.debug()
    config.training.seq_len = 1
    with pytest.raises(ConfigError, match=r"--training.seq-len is 1, expected >= 2"):
        check_config(config)


def test_a_model_that_is_compiled_whole_is_refused():
    class Traced(nn.Linear):
        def expected_visits(self):
            return ()

        def trace_meta(self):
            return None

    model = Traced(2, 2)
    check_model(model)
    with pytest.raises(UnsupportedError, match="whole model is compiled"):
        check_model(torch.compile(model))
    model.compile()
    with pytest.raises(UnsupportedError, match="whole model is compiled"):
        check_model(model)


def test_a_model_without_the_contract_is_refused():
    with pytest.raises(ConfigError, match=r"Linear has no expected_visits and no trace_meta\(\)"):
        check_model(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("out", "", "--loopscope.out is not set"),
        ("trace_every", -1, "trace_every is -1"),
        ("probe_every", -2, "probe_every is -2"),
        ("probe_seq_len", 1, "--loopscope.probe-seq-len is 1"),
        ("probe_batch_size", 0, "--loopscope.probe-batch-size is 0"),
    ],
)
def test_wrong_options_are_refused_by_name(name, value, words, tmp_path):
    options = configs.debug().loopscope
    options.out = str(tmp_path)
    setattr(options, name, value)
    with pytest.raises(ConfigError) as caught:
        options.to_config()
    assert words in str(caught.value)
