"""The configuration: defaults for all, overrides, and errors that name the key and the remedy."""

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from services.config import AUTO_K, Config, DrafterConfig, load
from services.errors import ConfigError

EVERY_KEY = """
[model]
path = "smollm2-135m"
name = "small"
[target]
device = "cpu"
tp = 1
dtype = "bf16"
kv_dtype = "int8"
weight_dtype = "int8"
exact = true
page_size = 16
num_pages = 4096
cores = [0, 1]
[[drafter]]
method = "small_model"
path = "student"
device = "cpu"
replicas = 1
required = false
rank = "argmax"
cores = [1]
[speculation]
mode = "async"
k = "auto"
shape = "auto"
sources = ["drafter", "lookup", "suffix"]
allow_lossy = false
patience_s = 0.01
sync_patience_s = 1
credit = 32
[limits]
max_sequences = 8
max_queue = 64
max_context = 8192
max_request_s = 600.0
step_rows = 256
[server]
grpc = "127.0.0.1:50051"
http = "127.0.0.1:8000"
metrics = "127.0.0.1:9400"
health = "127.0.0.1:50052"
reflection = true
max_message_bytes = 16777216
max_streams = 1024
min_ping_s = 5.0
keepalive_s = 20.0
keepalive_timeout_s = 5.0
slow_reader_s = 30.0
drain_s = 30.0
[cluster]
address = ""
start_timeout_s = 120.0
rank_timeout_s = 5.0
recovery_s = 60
inbox = 4096
outbox = 4096
"""


def test_every_key_has_a_default() -> None:
    assert load() == Config()


def test_every_key_can_be_set(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(EVERY_KEY)
    config = load(file)
    assert config.model.served_name == "small"
    assert config.target.cores == (0, 1)
    assert config.drafter == (DrafterConfig("small_model", "student", rank="argmax", cores=(1,)),)
    assert config.speculation.sync_patience_s == 1.0
    assert isinstance(config.speculation.sync_patience_s, float)


def test_the_file_above_names_every_key_there_is() -> None:
    default = Config()
    sections = [default.model, default.target, DrafterConfig(), default.speculation]
    sections += [default.limits, default.server, default.cluster]
    for section in sections:
        assert is_dataclass(section)
        for each in fields(section):
            assert f"\n{each.name} = " in EVERY_KEY


def test_overrides_come_on_top_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "paceline.toml"
    file.write_text(EVERY_KEY)
    overrides = [
        "speculation.mode=off",
        "speculation.k=6",
        "drafter.0.path=other student",
        "drafter.1.method=lookup",
        "target.cores=[0]",
        "model.path='quoted'",
        "limits.max_request_s=5",
    ]
    config = load(file, overrides)
    assert config.speculation.mode == "off"
    assert config.speculation.k == config.speculation.fixed_k == 6
    assert [each.path for each in config.drafter] == ["other student", ""]
    assert config.target.cores == (0,)
    assert config.model.path == "quoted"
    assert config.limits.max_request_s == 5.0


def test_auto_k_is_a_fixed_number_for_now() -> None:
    assert Config().speculation.fixed_k == AUTO_K


def test_exact_mode_is_the_default_on_a_cpu_only() -> None:
    assert load().target.is_exact
    assert not load(None, ["target.device=cuda"]).target.is_exact
    assert load(None, ["target.device=cuda", "target.exact=true"]).target.is_exact
    assert not load(None, ["target.exact=false"]).target.is_exact


def test_the_name_clients_ask_for_is_the_paths_last_part() -> None:
    assert load(None, ["model.path=models/tiny"]).model.served_name == "tiny"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("speculation.mod=off", "unknown key speculation.mod; did you mean 'mode'?"),
        ("speculatoin.mode=off", "unknown key speculatoin; did you mean 'speculation'?"),
        ("zzz.y=1", "unknown key zzz"),
        ("speculation.mode=asynk", "speculation.mode must be 'off' or 'sync' or 'async', is"),
        ("speculation.k=true", "speculation.k must be an integer or 'auto', is True"),
        ("speculation.k=0", 'speculation.k must be "auto" or 1 to 64'),
        ("speculation.k=65", 'speculation.k must be "auto" or 1 to 64'),
        ("speculation.patience_s=-1", "speculation.patience_s must be finite and not negative"),
        ("speculation.sources=['lokup']", "speculation.sources[0] must be"),
        ("speculation.credit=0", "speculation.credit must be at least 1, is 0"),
        ("target.tp=two", "target.tp must be an integer, is 'two'"),
        ("target.tp=0", "target.tp must be at least 1, is 0"),
        ("target.tp=1.5", "target.tp must be an integer, is 1.5"),
        ("target.cores=[0, 0]", "target.cores names a core twice"),
        ("target.cores=3", "target.cores must be a list, is 3"),
        ("target.exact=yes", "target.exact must be true or false, is 'yes'"),
        ("drafter.0.replicas=0", "drafter.replicas must be at least 1"),
        ("drafter.0.rnk=noise", "unknown key drafter[0].rnk; did you mean 'rank'?"),
        ("drafter.3.path=x", "3 is beyond the list's 0 entries"),
        ("drafter.x.path=y", "drafter must be a list, is {'x': {'path': 'y'}}"),
        ("limits.max_context=1", "limits.max_context must be at least 2"),
        ("limits.max_request_s=nan", "limits.max_request_s must be positive and finite"),
        ("limits.max_request_s=true", "limits.max_request_s must be a number, is True"),
        ("limits.step_rows=7", "limits.step_rows must be at least limits.max_sequences"),
        ("limits.max_queue=-1", "limits.max_queue must be at least 0"),
        ("server.grpc=", "server.grpc is empty"),
        ("server.grpc=localhost", "server.grpc must be host:port, is 'localhost'"),
        ("server.grpc=localhost:99999", "server.grpc must be host:port"),
        ("server.health=127.0.0.1:50051", "server.health is '127.0.0.1:50051', as another"),
        ("server.drain_s=0", "server.drain_s must be positive and finite"),
        ("cluster.start_timeout_s=inf", "cluster.start_timeout_s must be positive and finite"),
        ("model=x", "model must be a table of keys, is 'x'"),
        ("model.path=", "model.path is empty"),
        ("model.path.deep=x", "model.path must be a text"),
        ("speculation", "speculation is not of the form section.key=value"),
        ("=3", "=3 is not of the form section.key=value"),
    ],
)
def test_what_cannot_work_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [override])
    assert str(caught.value).startswith(message)


def test_addresses_with_a_free_port_and_ipv6_are_taken() -> None:
    config = load(None, ["server.grpc=[::1]:0", "server.health=127.0.0.1:0", "server.http="])
    assert config.server.grpc == "[::1]:0"


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent"):
        load(tmp_path / "absent.toml")
    file = tmp_path / "broken.toml"
    file.write_text("[model\npath = 3")
    with pytest.raises(ConfigError, match=r"broken\.toml is not a TOML file: .*line 1"):
        load(file)
    file.write_bytes(b"[model]\npath = '\xff'")
    with pytest.raises(ConfigError, match="not a TOML file"):
        load(file)


@pytest.mark.parametrize("seconds", ["1e-9", "0.05", "inf", "nan"])
def test_a_rank_gets_time_for_a_step(seconds: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.rank_timeout_s must be at least 0\.1 s"):
        load(overrides=[f"cluster.rank_timeout_s={seconds}"])
