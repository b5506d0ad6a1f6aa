"""SGLang's real server on the CPU, with hybrid_mla and with its own torch backend, on a small model, in fp32.

Servers are started once for all tests, most of them as forks of one process that has imported SGLang (fork_server.py);
`/server_info` counts from then on, so tests look at differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import psutil
import pytest
import requests
from bench.server import SCRIPTS, server_info
from demo import MODEL
from demo_model.checkpoint import DRAFTING, Settings, make
from failing import FAILING
from fork_server import RUN_FIRST
from known import Known, make_known
from server_pool import Launch, Running, ServerPool, last_words

from sglang_mla_ext.adapter.compat import contract

LOGPROB_TOLERANCE = 2e-3
"""fp32 in another order of summation; a wrong prefix or a wrong merge moves them by 0.1 and more."""


@dataclass(frozen=True)
class Chat:
    """One request; equal chats must get equal answers from both servers."""

    system: str
    user: str
    max_tokens: int = 16
    delay_s: float = 0.0


@dataclass
class Answer:
    tokens: list[str]
    logprobs: list[float]


class Server:
    """A running server and what tests do with it."""

    def __init__(self, running: Running) -> None:
        self.process, self.base_url, self.log = running.process, running.base_url, running.log

    def ask(self, *chats: Chat) -> list[Answer]:
        """Send chats at the same time (after their delays) and wait for all answers.

        What is sent together starts together: on a busy machine a server may take up one request, answer it, and only
        then take up the next.
        """
        together = len(chats) > 1 and not any(chat.delay_s for chat in chats)

        async def all_of_them() -> list[Answer]:
            async with self.client() as client:
                with self.paused() if together else contextlib.nullcontext():
                    answers = asyncio.gather(*(self.ask_one(client, chat) for chat in chats))
                    if together:
                        await self.has_taken(len(chats))
                return list(await answers)

        return asyncio.run(all_of_them())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """All processes stand still but the one that takes requests: they wait for the scheduler, and not for a
        processor that it has."""
        started = psutil.Process(self.process.pid).children(recursive=True)
        for each in started:
            each.suspend()
        try:
            yield
        finally:
            for each in started:
                each.resume()

    async def has_taken(self, requests: int) -> None:
        """Wait until the process that takes requests has so many, and nothing more to do with them."""
        server, port = psutil.Process(self.process.pid), urlsplit(self.base_url).port
        waits = 0
        for _ in range(500):
            await asyncio.sleep(0.02)
            connections = server.net_connections("tcp")
            taken = sum(each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port for each in connections)
            waits = waits + 1 if taken >= requests and server.status() == psutil.STATUS_SLEEPING else 0
            if waits == 8:
                return
        raise AssertionError(f"{requests} requests were sent, and the server took {taken}")

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", timeout=300, max_retries=0)

    @staticmethod
    async def ask_one(client: openai.AsyncOpenAI, chat: Chat, **more: Any) -> Answer:
        """`more` goes into the request's body."""
        await asyncio.sleep(chat.delay_s)
        messages: list[Any] = [{"role": "user", "content": chat.user}]
        if chat.system:
            messages.insert(0, {"role": "system", "content": chat.system})
        answer = await client.chat.completions.create(
            model="default",
            messages=messages,
            temperature=0,
            max_tokens=chat.max_tokens,
            logprobs=True,
            extra_body={"ignore_eos": True, **more},  # so that requests run together as long as a test needs
        )
        content = answer.choices[0].logprobs.content
        return Answer([token.token for token in content], [token.logprob for token in content])

    def info(self) -> dict[str, Any]:
        """The `hybrid_mla` entry of `/server_info`."""
        return server_info(self.base_url)["hybrid_mla"]

    def counters(self) -> list[dict[str, Any]]:
        """Of each data-parallel rank."""
        states = requests.get(f"{self.base_url}/server_info", timeout=120).json()["internal_states"]
        return [state["hybrid_mla"]["counters"] for state in states]

    def flush(self) -> None:
        """Wait until the server is idle and empty its cache."""
        deadline = time.monotonic() + 60
        while not requests.post(f"{self.base_url}/flush_cache", timeout=60).ok:
            assert time.monotonic() < deadline, "the server does not become idle"
            time.sleep(0.2)


class Reference(Server):
    """The stock server, which says what answers should be.

    Each chat is asked once, as long as it has been wanted so far: answers are greedy, so a shorter one is the beginning
    of a longer one.
    """

    def __init__(self, running: Running) -> None:
        super().__init__(running)
        self._answers: dict[tuple[str, str], Answer] = {}
        self._thread = ThreadPoolExecutor(1)

    def ask(self, *chats: Chat) -> list[Answer]:
        return self.asking(*chats).result()

    def asking(self, *chats: Chat) -> Future[list[Answer]]:
        """Ask in a thread, while the test asks another server."""
        return self._thread.submit(self._ask, chats)

    def _ask(self, chats: Sequence[Chat]) -> list[Answer]:
        missing = {(chat.system, chat.user): 0 for chat in chats}
        for chat in chats:
            known = self._answers.get((chat.system, chat.user))
            if known is None or len(known.tokens) < chat.max_tokens:
                missing[chat.system, chat.user] = max(missing[chat.system, chat.user], chat.max_tokens)
        asked = [Chat(*key, max_tokens) for key, max_tokens in missing.items() if max_tokens]
        for chat, answer in zip(asked, super().ask(*asked), strict=True):
            self._answers[chat.system, chat.user] = answer
        whole = [(self._answers[chat.system, chat.user], chat.max_tokens) for chat in chats]
        return [Answer(answer.tokens[:length], answer.logprobs[:length]) for answer, length in whole]


def in_thread(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Call it while the test goes on; a test that is interrupted does not wait for it."""
    return ThreadPoolExecutor(1).submit(function, *arguments)


@dataclass
class Counted:
    """Counters of a stretch of time: differences."""

    steps_naive: int = 0
    steps_grouped: int = 0
    expansions: int = 0
    evictions: int = 0
    prefills_naive: int = 0
    prefill_tokens_saved: int = 0
    shadow_checks: int = 0


@contextlib.contextmanager
def counting(server: Server) -> Iterator[Counted]:
    """Count what a server does inside the context; fall-backs are an error."""
    before = server.info()["counters"]
    counted = Counted()
    yield counted
    after = server.info()["counters"]
    for name in asdict(counted):
        setattr(counted, name, after[name] - before[name])
    assert after["fallbacks"] == before["fallbacks"] and after["shadow_failures"] == 0


def assert_same(actual: list[Answer], expected: list[Answer]) -> None:
    """Same tokens, same log-probabilities within rounding."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.tokens == b.tokens, f"request {index}"
        worst = max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))
        assert worst < LOGPROB_TOLERANCE, f"request {index}: log-probabilities differ by {worst}"


LAUNCHES: dict[str, Launch] = {}
POOL = pytest.StashKey[ServerPool]()


def _server(name: str, *arguments: str, kind: type[Server] = Server, **launch: Any) -> Any:
    """The fixture of a server that runs from before its first use until after its last."""
    LAUNCHES[name] = Launch(arguments, **launch)

    @pytest.fixture(scope="session", name=name)
    def server(servers: ServerPool) -> Server:
        return kind(servers.get(name))

    return server


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerPool]:
    used = [name for item in request.session.items for name in getattr(item, "fixturenames", ()) if name in LAUNCHES]
    pool = ServerPool(LAUNCHES, list(dict.fromkeys(used)), tmp_path_factory.mktemp("servers"))
    request.session.stash[POOL] = pool
    # SIGTERM ends the session as Ctrl-C does: through this fixture's end.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        pool.start_real_ones()
        yield pool
    finally:
        pool.close()
        signal.signal(signal.SIGTERM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """Servers that no later test uses give their memory back."""
    yield
    pool = item.session.stash.get(POOL, None)
    if pool is not None and nextitem is not None:
        later = item.session.items[item.session.items.index(nextitem) :]
        pool.keep_only({name for test in later for name in getattr(test, "fixturenames", ())})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows the end of the logs of its servers."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Server):
                report.sections.append((f"server {name}", last_words(value.process, value.log)))
    return report


def demo(folder: Path) -> Path:
    """What is shipped, which is trained."""
    return MODEL


# What a server takes is said, not a share of what is free: others start and work meanwhile.
SIZED = ("--mem-fraction-static", "0.5", "--max-total-tokens", "16384")
HYBRID = ("--attention-backend", "hybrid_mla", "--hybrid-mla-min-prefix-len", "32")
# Every shared prefix of 32 tokens and more is expanded.
NAIVE = (*HYBRID, "--hybrid-mla-mode", "naive")
PREFIXES = ("--hybrid-mla-prefix-memory-gb", "0.2")
# But here the cache is as large as a tenth of the memory allows. Prefill in chunks.
BY_MEMORY = ("--max-total-tokens", str(1 << 30), "--chunked-prefill-size", "256")

# Parts of it fail when a test wants it (failing.py).
FAILING_FOLDER = Path(tempfile.gettempdir()) / f"failing-{os.getpid()}"
FAILS = {RUN_FIRST: str(Path(__file__).with_name("failing.py")), FAILING: str(FAILING_FOLDER)}
Fail = Callable[..., None]


@pytest.fixture
def fail() -> Iterator[Fail]:
    """`fail(name=times)`: see failing.py."""
    FAILING_FOLDER.mkdir(exist_ok=True)

    def set_up(**times: int) -> None:
        for name, count in times.items():
            (FAILING_FOLDER / name).write_text(str(count))

    yield set_up
    for file in FAILING_FOLDER.iterdir():
        file.unlink()
    FAILING_FOLDER.rmdir()


PROCESSOR = "--enable-custom-logit-processor"
stock = _server("stock", "--attention-backend", "torch_native", *SIZED, PROCESSOR, kind=Reference)
# Every fifth step is computed again by plain absorb. Requests may bring a logit processor of the scripts.
hybrid = _server(
    "hybrid",
    *(*NAIVE, *SIZED, *PREFIXES, "--enable-metrics", "--hybrid-mla-verify-interval", "5"),
    PROCESSOR,
    environment={"PYTHONPATH": str(SCRIPTS)},
)
# Every shared prefix of 32 tokens and more is read once for all its requests; nothing is expanded.
grouped = _server("grouped", *HYBRID, "--hybrid-mla-mode", "grouped_absorb", *SIZED)
fp8_prefix = _server("fp8_prefix", *NAIVE, *SIZED, *PREFIXES, "--hybrid-mla-prefix-dtype", "fp8_e4m3")
bf16_cache = _server("bf16_cache", *NAIVE, *BY_MEMORY, "--kv-cache-dtype", "bf16", model=demo)
fp8_cache = _server("fp8_cache", *NAIVE, *BY_MEMORY, "--kv-cache-dtype", "fp8_e4m3", model=demo)
# Tensor parallelism: half of the heads in each of two processes, which must plan alike. They are started as two
# machines start theirs. SGLang wants the cores of each.
two_ranks = _server(
    "two_ranks",
    *(*NAIVE, *SIZED, *PREFIXES, "--tp", "2", "--hybrid-mla-mixed-tokens", "128"),
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    nodes=2,
)
# The same processes, each with all heads and requests of its own; what follows attention is computed for all of them.
# They hold expanded prefixes together, each half of the heads; prefill expands for itself what its requests share.
dp_attention = _server(
    "dp_attention",
    *(*NAIVE, *SIZED, *PREFIXES, "--tp", "2", "--dp-size", "2", "--enable-dp-attention"),
    *("--hybrid-mla-mixed-tokens", "128", "--hybrid-mla-prefix-sharding", "nccl", "--hybrid-mla-verify-interval", "5"),
    *("--hybrid-mla-prefill-expand-tokens", "256"),
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1", **FAILS},
)
dp_attention_of_four = _server(
    "dp_attention_of_four",
    *(*NAIVE, *SIZED, *PREFIXES, "--tp", "4", "--dp-size", "4", "--enable-dp-attention"),
    *("--hybrid-mla-prefix-sharding", "nccl", "--hybrid-mla-verify-interval", "5"),
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"},
)
# And each with prefixes of its own.
dp_attention_apart = _server(
    "dp_attention_apart",
    *(*NAIVE, *SIZED, *PREFIXES, "--tp", "2", "--dp-size", "2", "--enable-dp-attention"),
    *("--hybrid-mla-mixed-tokens", "128"),
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
)
# Half of the heads, and half of the requests: two ranks attend together.
dp_attention_of_two = _server(
    "dp_attention_of_two",
    *(*NAIVE, *SIZED, *PREFIXES, "--tp", "4", "--dp-size", "2", "--enable-dp-attention"),
    *("--hybrid-mla-mixed-tokens", "128"),
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"},
)
# Two servers in one, which share nothing, and keep prompts apart.
two_replicas = _server(
    "two_replicas",
    *(*NAIVE, *SIZED, *PREFIXES, "--dp-size", "2", "--hybrid-mla-dp-routing", "prefix"),
    # The cores of each rank; the older releases want those of one replica.
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0" if contract.line() == "0.5.17" else "0|1"},
)
# 2,048 tokens of cache, and on the host what goes out of it: SGLang's HiCache.
ON_HOST = (
    *(*NAIVE, *SIZED, *PREFIXES, "--max-total-tokens", "2048", "--enable-hierarchical-cache"),
    *("--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first", "--hicache-ratio", "4"),
    "--enable-metrics",
)
on_host = _server("on_host", *ON_HOST)
on_host_fp8 = _server("on_host_fp8", *ON_HOST, "--kv-cache-dtype", "fp8_e4m3", model=demo)
# And in files what is on the host, one for each token.
STORED = Path(tempfile.gettempdir()) / f"stored-{os.getpid()}"
IN_FILES = (*ON_HOST, "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
FILES = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(STORED)}
in_files = _server("in_files", *IN_FILES, environment=FILES)


@pytest.fixture
def no_files() -> Iterator[None]:
    """What `in_files` and its like have stored is deleted behind a test."""
    yield
    shutil.rmtree(STORED, ignore_errors=True)


# Prefill in chunks, expansion in small steps, room for one prefix and a part of another, 2,048 tokens of cache, and
# SGLang's own way to test retraction: every so many steps it takes back a request as if its cache were full.
# This is the one server that the real command line starts.
cramped = _server(
    "cramped",
    *(*NAIVE, "--hybrid-mla-min-prefix-len", "64"),
    *("--hybrid-mla-expand-tokens-per-step", "100", "--hybrid-mla-prefix-memory-gb", "0.0212"),
    *(*SIZED, "--max-total-tokens", "2048", "--chunked-prefill-size", "256", "--hybrid-mla-mixed-tokens", "64"),
    *("--max-prefill-tokens", "256"),  # with 0.5.23 buffers of prefill have as many rows, and those of a chunk
    environment={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "60"},
    real=True,
)

# New tokens are mixed into its decode steps, which without a GPU have no graph; every fourth step is computed again.
MIXED = (*NAIVE, *SIZED, *PREFIXES, "--max-running-requests", "12")
mixed = _server(
    "mixed",
    *(*MIXED, "--hybrid-mla-mixed-tokens", "128", "--hybrid-mla-verify-interval", "4"),
    "--enable-return-hidden-states",
    *("--max-total-tokens", "4096", "--schedule-conservativeness", "0.01"),  # so that it can be full
    *("--enable-priority-scheduling", PROCESSOR),
)
# So many at a time of every prompt, whoever shares most comes first, and SGLang takes back requests.
mixed_in_pieces = _server(
    "mixed_in_pieces",
    *(*MIXED, "--hybrid-mla-mixed-tokens", "96", "--chunked-prefill-size", "96", "--schedule-policy", "lpm"),
    environment={RUN_FIRST: str(Path(__file__).with_name("retracting.py"))},
)

failing = _server("failing", *NAIVE, *SIZED, *PREFIXES, "--enable-metrics", environment=FAILS)


def v2_lite(folder: Path) -> Path:
    """DeepSeek-V2-Lite's architecture: queries of one projection."""
    out = folder / "v2_lite"
    make(out, Settings(2, 4, 128, 512, 0, 2048, 16384, seed=0, config_only=False))
    return out


def experts(folder: Path) -> Path:
    """DeepSeek-V3's architecture with a layer of experts."""
    out = folder / "experts"
    make(out, Settings(2, 4, 128, 512, 64, 2048, 16384, seed=0, config_only=False, experts=True))
    return out


def kimi_k2(folder: Path) -> Path:
    """Kimi-K2 in a small width: its own configuration, with 64 heads and 384 experts."""
    out = folder / "kimi_k2"
    make_known(out, Known("kimi-k2"))
    return out


def longcat_flash(folder: Path) -> Path:
    """LongCat-Flash in a small width: two attentions a layer, and experts that compute nothing."""
    out = folder / "longcat_flash"
    make_known(out, Known("longcat-flash", heads=8))
    return out


def kimi_linear(folder: Path) -> Path:
    """Kimi-Linear in a small width: layers with linear attention among those with MLA; 12 heads, and no rotation."""
    out = folder / "kimi_linear"
    make_known(out, Known("kimi-linear", layers=4, heads=12))
    return out


def kimi_k3(folder: Path) -> Path:
    """Kimi-K3 in a small width, read as of text: 6 heads, MLA with a gate, residuals that are mixed, latent experts."""
    out = folder / "kimi_k3"
    make_known(out, Known("kimi-k3", layers=4, heads=6))
    return out


def mistral_large_3(folder: Path) -> Path:
    """Mistral Large 3 in a small width: queries are scaled by their positions, from 64 tokens on."""
    out = folder / "mistral_large_3"
    make_known(out, Known("mistral-large-3", heads=8))
    return out


def glm_4_7_flash(folder: Path) -> Path:
    """GLM-4.7-Flash in a small width: its 20 heads, of 192 content and 256 value dimensions, and its 64 experts."""
    out = folder / "glm_4_7_flash"
    make_known(out, Known("glm-4.7-flash"))
    return out


STOCK = ("--attention-backend", "torch_native", *SIZED)
stock_demo = _server("stock_demo", *STOCK, kind=Reference, model=demo)
drafts = _server("drafts", *NAIVE, *SIZED, *PREFIXES, *DRAFTING, "--hybrid-mla-verify-interval", "5", model=demo)
# New tokens are rows of the steps that verify drafts; every fourth step is computed again.
mixed_drafts = _server(
    "mixed_drafts",
    *(*NAIVE, *SIZED, *PREFIXES, *DRAFTING, "--max-running-requests", "12", "--hybrid-mla-mixed-tokens", "512"),
    *("--hybrid-mla-verify-interval", "4", "--max-total-tokens", "6144"),
    model=demo,
)
on_host_drafts = _server("on_host_drafts", *ON_HOST, *DRAFTING, model=demo)
drafts_of_two = _server(
    "drafts_of_two",
    *(*NAIVE, *SIZED, *PREFIXES, *DRAFTING, "--tp", "2", "--dp-size", "2", "--enable-dp-attention"),
    *("--hybrid-mla-prefix-sharding", "nccl", "--hybrid-mla-verify-interval", "5"),
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    model=demo,
)
drafts_apart = _server(
    "drafts_apart",
    *(*NAIVE, *SIZED, *PREFIXES, *DRAFTING, "--tp", "2", "--dp-size", "2", "--enable-dp-attention"),
    environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    model=demo,
)
stock_v2_lite = _server("stock_v2_lite", *STOCK, kind=Reference, model=v2_lite)
hybrid_v2_lite = _server("hybrid_v2_lite", *NAIVE, *SIZED, *PREFIXES, model=v2_lite)
stock_experts = _server("stock_experts", *STOCK, kind=Reference, model=experts)
hybrid_experts = _server("hybrid_experts", *NAIVE, *SIZED, *PREFIXES, model=experts)
stock_kimi_k2 = _server("stock_kimi_k2", *STOCK, kind=Reference, model=kimi_k2)
# Buffers for rows of prefill take 0.6 GiB with 64 heads on a CPU, and 0.2 with 20 of 256 values.
MANY_HEADS = ("--hybrid-mla-prefix-memory-gb", "1")
hybrid_kimi_k2 = _server("hybrid_kimi_k2", *NAIVE, *SIZED, *MANY_HEADS, model=kimi_k2)
# Its configuration has not what SGLang reads: rotation without scaling.
ROTATION = ("--json-model-override-args", '{"rope_parameters": {"factor": 1.0}}')
stock_longcat_flash = _server("stock_longcat_flash", *STOCK, *ROTATION, kind=Reference, model=longcat_flash)
LINEAR = ("--max-running-requests", "16", "--max-mamba-cache-size", "80")  # states are larger than the rest
stock_kimi_linear = _server("stock_kimi_linear", *STOCK, *LINEAR, kind=Reference, model=kimi_linear)
hybrid_kimi_linear = _server(
    "hybrid_kimi_linear",
    *(*NAIVE, *SIZED, *PREFIXES, *LINEAR, "--hybrid-mla-verify-interval", "5"),
    model=kimi_linear,
)
stock_kimi_k3 = _server("stock_kimi_k3", *STOCK, *LINEAR, kind=Reference, model=kimi_k3)
hybrid_kimi_k3 = _server("hybrid_kimi_k3", *NAIVE, *SIZED, *PREFIXES, *LINEAR, model=kimi_k3)
stock_mistral_large_3 = _server("stock_mistral_large_3", *STOCK, kind=Reference, model=mistral_large_3)
linear_fp8 = _server(
    "linear_fp8",
    *(*NAIVE, *SIZED, *PREFIXES, *LINEAR, "--kv-cache-dtype", "fp8_e4m3", "--hybrid-mla-verify-interval", "5"),
    model=kimi_linear,
)
linear_on_host = _server(
    "linear_on_host", *(*ON_HOST, *LINEAR, "--hicache-mem-layout", "page_first_direct"), model=kimi_linear
)
hybrid_mistral_large_3 = _server("hybrid_mistral_large_3", *NAIVE, *SIZED, *PREFIXES, model=mistral_large_3)
hybrid_longcat_flash = _server("hybrid_longcat_flash", *NAIVE, *SIZED, *PREFIXES, *ROTATION, model=longcat_flash)
stock_glm_4_7_flash = _server("stock_glm_4_7_flash", *STOCK, kind=Reference, model=glm_4_7_flash)
hybrid_glm_4_7_flash = _server("hybrid_glm_4_7_flash", *NAIVE, *SIZED, *MANY_HEADS, model=glm_4_7_flash)
