import subprocess
import sys
from typing import Any

import pytest

from cleave.errors import UsageError
from cleave.workload.registry import MODELS, Family, find_model, spec_from_config


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("opt-125m", 125e6),
        ("opt-350m", 331e6),
        ("opt-1.3b", 1.316e9),
        ("opt-2.7b", 2.65e9),
        ("opt-6.7b", 6.66e9),
        ("opt-13b", 12.85e9),
        ("opt-30b", 29.97e9),
        ("opt-66b", 65.7e9),
        ("opt-175b", 174.6e9),
        ("llama2-7b", 6.738e9),
        ("llama2-13b", 13.016e9),
        ("llama2-70b", 68.977e9),
    ],
)
def test_published_sizes_have_their_published_parameter_counts(name: str, published: float) -> None:
    assert find_model(name).parameters == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("OPT-125M", "opt-125m"),
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("meta-llama/Llama-2-70b-hf", "llama2-70b"),
        (" opt-nano ", "opt-nano"),
    ],
)
def test_usual_spellings_name_the_same_model(spelling: str, name: str) -> None:
    assert find_model(spelling) is MODELS[name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("opt-12b", "opt-1"),
        ("somebody/opt-125m", "opt-125m"),
        ("zzzzzz", "opt-nano.*llama2-70b"),
    ],
)
def test_unknown_name_suggests_close_ones_and_a_folder(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*{said}.*folder"):
        find_model(name)


LLAMA_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def test_config_without_optional_fields_is_plain_llama() -> None:
    spec = spec_from_config({**LLAMA_CONFIG, "head_dim": None}, "mine")
    assert (spec.name, spec.family) == ("mine", Family.LLAMA)
    assert (spec.kv_heads, spec.head_width, spec.tied_head) == (4, 16, False)


def test_config_of_another_architecture_is_read_as_far_as_it_goes() -> None:
    spec = spec_from_config(
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
            "n_inner": None,
        },
        "gpt2",
    )
    assert (spec.layers, spec.width, spec.ffn_width) == (12, 768, 3072)
    assert spec.tied_head


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "wide"}, "'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_attention_heads": 5}, "5 heads"),
    ],
)
def test_wrong_config_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spec_from_config({**LLAMA_CONFIG, **change}, "mine")


def test_numbers_need_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from cleave.workload.build import resolve_model\n"
        "from cleave.workload.step import step_flops\n"
        "print(step_flops(resolve_model('opt-13b').spec, 128, 1024))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10**16
