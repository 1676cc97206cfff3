"""One set of options for flags, environment, YAML file and docs."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

from foredraft.config import OPTIONS, ConfigError, S, build, collect, markdown_table
from foredraft.settings import DraftSettings, OrchestratorSettings, TargetSettings

CONFIGURATION = Path(__file__).parent.parent / "docs" / "configuration.md"


def write(directory: Path, text: str) -> Path:
    file = directory / "foredraft.yaml"
    file.write_text(text)
    return file


def gather(flags: Mapping[str, object], config: Path | None, environment: dict[str, str]) -> dict[str, object]:
    """What `collect` returns when the process has this environment."""
    with mock.patch.dict(os.environ, environment, clear=True):
        return collect(flags, config)


def load(service: type[S], flags: Mapping[str, object], config: Path | None, environment: dict[str, str]) -> S:
    """What `foredraft.config.load` returns when the process has this environment."""
    return build(service, gather(flags, config, environment))


def refused(flags: dict[str, object], environment: dict[str, str] | None = None, config: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(OrchestratorSettings, flags, config, environment or {})
    return str(caught.value)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "max_draft_tokens: 1\ntarget_wait_s: 1\ndraft_timeout_s: 1\n")
    environment = {"FOREDRAFT_MAX_DRAFT_TOKENS": "2", "FOREDRAFT_TARGET_WAIT_S": "2"}
    settings = load(OrchestratorSettings, {"max_draft_tokens": "3", "mode": None}, file, environment)
    assert (settings.max_draft_tokens, settings.target_wait_s, settings.draft_timeout_s) == (3, 2, 1)
    assert settings.mode == "overlapped"


def test_the_file_can_be_named_by_the_environment_and_a_flag_wins(tmp_path: Path) -> None:
    named, flagged = tmp_path / "named.yaml", tmp_path / "flagged.yaml"
    named.write_text("max_draft_tokens: 1")
    flagged.write_text("max_draft_tokens: 2")
    environment = {"FOREDRAFT_CONFIG": str(named)}
    assert load(OrchestratorSettings, {}, None, environment).max_draft_tokens == 1
    assert load(OrchestratorSettings, {}, flagged, environment).max_draft_tokens == 2


def test_one_file_serves_all_three_services(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "model: big\ndraft_model: small\ndtype: float32\ndraft_dtype: bfloat16\ntarget_listen: 127.0.0.1:1\n"
        "draft_listen: 127.0.0.1:2\nlisten: 127.0.0.1:3\ngrace_s: 5\n",
    )
    target, draft = load(TargetSettings, {}, file, {}), load(DraftSettings, {}, file, {})
    orchestrator = load(OrchestratorSettings, {}, file, {})
    assert (target.model, target.dtype, target.listen, target.grace_s) == ("big", "float32", "127.0.0.1:1", 5)
    assert (draft.draft_model, draft.dtype, draft.listen, draft.drafter) == (
        "small",
        "bfloat16",
        "127.0.0.1:2",
        "combined",
    )
    assert (orchestrator.listen, orchestrator.grace_s) == ("127.0.0.1:3", 5)


def test_null_unsets_an_option_everywhere_and_an_empty_variable_is_not_there(tmp_path: Path) -> None:
    file = write(tmp_path, "draft: null\n")
    assert load(OrchestratorSettings, {}, file, {}).draft is None
    assert load(OrchestratorSettings, {}, None, {"FOREDRAFT_DRAFT": "null"}).draft is None
    assert load(OrchestratorSettings, {"draft": "null"}, None, {}).draft is None
    assert load(OrchestratorSettings, {}, None, {"FOREDRAFT_DRAFT": ""}).draft == ("127.0.0.1:50053",)


@pytest.mark.parametrize(
    ("text", "expected"), [("true", True), ("1", True), ("on", True), ("false", False), ("0", False), ("no", False)]
)
def test_booleans_in_the_environment(text: str, expected: bool) -> None:
    settings = load(OrchestratorSettings, {}, None, {"FOREDRAFT_SPECULATION_ENABLED": text})
    assert settings.speculation_enabled is expected


def test_unknown_keys_are_refused_with_the_nearest_name(tmp_path: Path) -> None:
    assert "unknown option max_draft_token; did you mean max_draft_tokens?" in refused(
        {}, config=write(tmp_path, "max_draft_token: 4")
    )
    assert "speculative_conf; did you mean speculative_config?" in refused(
        {}, config=write(tmp_path, "speculative_conf: 1")
    )
    message = refused({}, {"FOREDRAFT_MAX_DRAFT_TOKEN": "4"})
    assert message == "unknown environment variable FOREDRAFT_MAX_DRAFT_TOKEN; did you mean FOREDRAFT_MAX_DRAFT_TOKENS?"
    assert "did you mean" not in refused({}, {"FOREDRAFT_ZZZ": "4"})


def test_variables_that_kubernetes_sets_for_services_are_ignored() -> None:
    environment = {
        "FOREDRAFT_TARGET_SERVICE_HOST": "10.0.0.1",
        "FOREDRAFT_TARGET_SERVICE_PORT_GRPC": "50052",
        "FOREDRAFT_TARGET_PORT": "tcp://10.0.0.1:50052",
        "FOREDRAFT_TARGET_PORT_50052_TCP_ADDR": "10.0.0.1",
        "FOREDRAFT_PORT": "tcp://10.0.0.1:50051",
        "FOREDRAFT_CACHE": "/cache",
    }
    assert gather({}, None, environment) == {}


def test_out_of_range_values_are_named_with_their_limit() -> None:
    message = refused({"max_draft_tokens": "65", "target_accept_rate": "1.5", "listen": "50051", "mode": "fast"})
    assert len(message.splitlines()) == 4
    assert "max_draft_tokens: input should be less than or equal to 64, not '65'" in message
    assert "target_accept_rate: input should be less than or equal to 1" in message
    assert "listen: must be host:port" in message
    assert "'plain', 'sequential' or 'overlapped'" in message


def test_a_missing_model_says_how_to_give_one() -> None:
    with pytest.raises(ConfigError, match="model is required: --model, FOREDRAFT_MODEL or model: in the YAML file"):
        load(TargetSettings, {}, None, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"drafter": "model"}, "drafter: model needs draft_model"),
        ({"drafter": "combined"}, "drafter: combined needs draft_model"),
        ({"draft_layers": "4"}, "draft_layers needs draft_model"),
        ({"ngram_min": "4"}, "ngram_min must be at most ngram_max, not 4 > 3"),
    ],
)
def test_draft_options_that_contradict_each_other(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(DraftSettings, flags, None, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tls_cert": "c"}, "tls_cert needs tls_key"),
        ({"tls_key": "k"}, "tls_key needs tls_cert"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs tls_cert and tls_key"),
        ({"tls_ca": "a", "tls_client_cert": "c"}, "tls_client_cert needs tls_client_key"),
        ({"tls_client_cert": "c", "tls_client_key": "k"}, "tls_client_cert needs tls_ca"),
    ],
)
def test_tls_options_that_are_not_enough(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(OrchestratorSettings, flags, None, {})


@pytest.mark.parametrize(("content", "message"), [("- 1", "must be a mapping"), ("a: [", "is not YAML")])
def test_a_file_that_is_no_mapping_is_refused(content: str, message: str, tmp_path: Path) -> None:
    assert message in refused({}, config=write(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused({}, config=tmp_path / "none.yaml")


def test_vllm_speculative_config_in_a_file(tmp_path: Path) -> None:
    file = write(
        tmp_path, "model: big\nspeculative_config:\n  model: small\n  num_speculative_tokens: 5\n  method: draft_model"
    )
    draft, orchestrator = load(DraftSettings, {}, file, {}), load(OrchestratorSettings, {}, file, {})
    assert (draft.draft_model, draft.drafter, orchestrator.max_draft_tokens) == ("small", "model", 5)


def test_vllm_speculative_config_as_a_flag() -> None:
    block = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    draft = load(DraftSettings, {"speculative_config": block}, None, {})
    assert (draft.drafter, draft.ngram_max, draft.ngram_min) == ("ngram", 4, 2)
    assert load(OrchestratorSettings, {"speculative_config": block}, None, {}).max_draft_tokens == 3


@pytest.mark.parametrize(
    "block", [{"decoding_type": "DraftTarget", "max_draft_len": 7, "speculative_model": "small"}], ids=["tensorrt"]
)
def test_tensorrt_speculative_config(block: dict[str, object]) -> None:
    flags = {"speculative_config": block}
    assert load(DraftSettings, flags, None, {}).draft_model == "small"
    assert load(OrchestratorSettings, flags, None, {}).max_draft_tokens == 7


def test_speculative_decoding_block(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "speculative_decoding: {enabled: false, draft_model: small, max_draft_tokens: 6, target_accept_rate: 0.7}",
    )
    orchestrator = load(OrchestratorSettings, {}, file, {})
    assert load(DraftSettings, {}, file, {}).draft_model == "small"
    assert not orchestrator.speculation_enabled
    assert (orchestrator.max_draft_tokens, orchestrator.target_accept_rate) == (6, 0.7)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa", "mtp"])
def test_methods_that_are_not_there_are_refused(method: str) -> None:
    message = refused({"speculative_config": json.dumps({"method": method, "num_speculative_tokens": 2})})
    assert f"speculative_config.method is {method}, which foredraft does not have" in message
    assert "draft_model" in message
    assert "ngram" in message


def test_a_block_with_an_unknown_key_or_bad_json_is_refused() -> None:
    assert "did you mean num_speculative_tokens?" in refused({"speculative_config": '{"num_speculative_token": 2}'})
    assert "is not JSON" in refused({"speculative_config": "{"})
    assert "must be a mapping" in refused({"speculative_config": "[1]"})


def test_a_block_that_contradicts_an_own_option_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "max_draft_tokens: 2\nspeculative_config: {num_speculative_tokens: 5}")
    assert "num_speculative_tokens is 5, but max_draft_tokens, which means the same, is 2" in refused({}, config=file)


def test_a_flag_overrides_a_block_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "speculative_config: {num_speculative_tokens: 5}")
    assert load(OrchestratorSettings, {"max_draft_tokens": "2"}, file, {}).max_draft_tokens == 2


def test_every_option_is_described() -> None:
    assert [name for name, field in OPTIONS.items() if not field.description] == []


def test_the_docs_have_the_current_table_of_options() -> None:
    _, begin, rest = CONFIGURATION.read_text(encoding="utf-8").partition("<!-- options -->\n")
    table, end, _ = rest.partition("\n<!-- /options -->")
    assert begin, "docs/configuration.md needs the line <!-- options --> before its table"
    assert end, "docs/configuration.md needs the line <!-- /options --> after its table"
    assert table.strip() == markdown_table(), "docs/configuration.md needs what `python -m foredraft.config` prints"


def test_settings_and_command_line_need_no_torch() -> None:
    code = (
        "import sys, foredraft.cli, foredraft.config; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
