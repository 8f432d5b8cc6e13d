"""Whose sampling is the default: the model's, another folder's, nobody's, and what replaces it."""

import json
from pathlib import Path

import pytest

from qinfer.errors import UserError
from qinfer.generation_config import default_params, parse_overrides
from qinfer.llm import LLM
from qinfer.sampling_params import SamplingParams


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 77, "eos_token_id": 5, "top_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(found))
    return tmp_path


def test_the_models_own_and_what_replaces_parts_of_it(folder: Path) -> None:
    own = default_params(folder, "auto", {})
    assert own == SamplingParams(temperature=0.6, top_k=20, max_tokens=77)
    changed = default_params(folder, "auto", {"temperature": 0.2, "max_new_tokens": 5})
    assert changed == SamplingParams(temperature=0.2, top_k=20, max_tokens=5)


def test_nobodys_or_another_folders(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    assert default_params(folder, "vllm", {}) == SamplingParams() == default_params(empty, "auto", {})
    assert default_params(folder, "vllm", {"top_k": 3}) == SamplingParams(top_k=3)
    assert default_params(empty, str(folder), {}).max_tokens == 77
    with pytest.raises(UserError, match="generation_config is auto, vllm or a folder"):
        default_params(folder, str(empty), {})


def test_mistakes_name_the_field(folder: Path) -> None:
    with pytest.raises(UserError, match="override_generation_config has 'heat'"):
        default_params(folder, "auto", {"heat": 1})
    with pytest.raises(UserError, match=r"generation_config\.json, as overridden: temperature") as raised:
        default_params(folder, "auto", {"temperature": 7})
    assert raised.value.parameter == "temperature"


def test_the_command_line_writes_overrides_as_json() -> None:
    assert parse_overrides(None) is None
    assert parse_overrides('{"top_k": 20}') == {"top_k": 20}
    for text in ("[1]", "top_k=20", ""):
        with pytest.raises(UserError, match="must be a JSON object"):
            parse_overrides(text)


def test_an_llm_takes_them(byte_level_folder: Path) -> None:
    llm = LLM(
        str(byte_level_folder),
        num_kv_blocks=16,
        generation_config="vllm",
        override_generation_config={"max_new_tokens": 3, "temperature": 0.0},
    )
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    (output,) = llm.generate("a", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 3
