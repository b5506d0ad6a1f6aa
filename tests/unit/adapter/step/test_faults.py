"""Whatever of ours fails in a running server, once or for good: no answer changes, SGLang sees no error, it is counted,
logged once for each reason and type of error, and sharing comes back.

The places are taken from the code: every function of the package, and every operation on tensors in it, that runs in
the life of a worker process (fault_life.py). So none can be forgotten: what is allocated elsewhere, what may end the
process, and what only a start calls, is listed here with the reason, and a list that has too much or too little fails.

A fork of a process with SGLang does it all. Run as a program, this file is that process. Every sixth place fails once,
and for good fail those listed and the first function of each file. The others with `-m slow`, which takes minutes:
after changes of what catches failures, and before a release.
"""

from __future__ import annotations

import ast
import gc
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import fault_life
import hooked_worker
import pytest
from faults import REPOSITORY, Fault, Functions, Watch, functions_of
from fork_server import ForkServer
from release import OLDEST

PROCESSES = 2

DOORS = {
    "adapter/step/backend.py HybridMLABackend.forward_decode",
    "adapter/step/backend.py HybridMLABackend.forward_extend",
    "adapter/step/backend.py HybridMLABackend.init_forward_metadata",
    "adapter/step/backend.py HybridMLABackend.merge",
    "adapter/step/admission.py Admission.add_request",
    "adapter/step/admission.py Admission.new_batch",
    "adapter/step/admission.py Admission.sync",
    "adapter/step/paired.py PairedSteps.process",
    "adapter/step/paired.py PairedSteps.run",
    "adapter/step/mixed.py around_forward_raw",
    "adapter/step/session.py Session.forward",
    "adapter/ranks/voting.py Voting.close",
    "adapter/step/layer.py after_split_q",
    "adapter/step/layer.py forward_method",
    "adapter/step/layer.py around_chunk_info",
    "adapter/step/layer.py around_prefix_attention",
}
"""Where SGLang's pass enters our code: what is ours in them is inside of `our_part`, and fails here too."""

THE_NET = {
    "adapter/failure.py around_pass",
    "adapter/failure.py our_part.__enter__",
    "adapter/failure.py our_part.__exit__",
    "adapter/failure.py our_part.__init__",
    "adapter/step/passes.py Pass.share_nothing",
    "adapter/step/steps.py Steps._repair",
    "adapter/step/steps.py Steps.has_lost_memory",
}
"""What catches the others."""

PLAIN_ABSORB = {
    "adapter/step/preparation.py Preparation.begin",
    "adapter/step/preparation.py Preparation.count_rows_as_prefill",
    "adapter/step/preparation.py Preparation._way_without_sharing",
    "adapter/step/backend.py HybridMLABackend._of_step",
    "adapter/step/backend.py HybridMLABackend._store",
    "adapter/step/backend.py HybridMLABackend._store:",  # its operation
    "adapter/step/layer.py absorbs_prefill",
    "adapter/step/preparation.py Preparation._write_plan",
    "adapter/step/passes.py Kind.is_step",
    "adapter/step/passes.py Kind.of",
    "adapter/stock/torch_native.py TorchStock.extend",
    "adapter/stock/torch_native.py after_support_triton",
}
"""What a step is taken through that shares nothing. SGLang's own backends have no other way either."""

START_HOOKS = {
    "CommonKVManager.__init__",
    "DefaultPoolConfigurator._compute_cell_size",
    "DraftBackendFactory.create_decode_backend",
    "DraftBackendFactory.create_draft_extend_backend",
    "KVCacheConfigurator._build_mla_kv_pool",
    "KVCacheConfigurator._profile_available_bytes",
    "MLATokenToKVPoolHost.__init__",
    "Scheduler.__init__",
    "base_cuda_graph_runner.get_batch_sizes_to_capture",
    "cuda_graph_buffer_registry.build_eager_registry",
    *(() if OLDEST else ("DecodeCudaGraphRunner.capture",)),
}
"""They may end a launch: a server that does not do what it was told to would lie."""

INSTEAD_OF_SGLANGS = {"fused_eh_norm.fused_eh_norm"}
"""They compute what SGLang has nothing for: of a small model's draft."""

OF_OTHER_MODELS = {
    "utils._get_llama_4_scaling",
    "DeepseekMHAForwardMixin.forward_normal_prepare",
    "KVCacheConfigurator._build_hybrid_linear_kv_pool",
}
"""Of queries that are scaled by their positions, and of layers with linear attention."""

REPLAYS = {"PrefillCudaGraphRunner.execute"}
"""Of prefill graphs, which a CPU has none of; passes without them go through the same function."""

OF_DRAFTS = {
    "adapter/compat/sglang_0_5_23/draft_extend.py _batch_of",
    "adapter/compat/sglang_0_5_23/draft_extend.py _output",
    "adapter/compat/sglang_0_5_23/draft_extend.py extend_draft",
    "adapter/step/paired.py PairedSteps.join",
    "adapter/step/paired.py PairedSteps.join.in_front",
    "adapter/step/paired.py lay_out",
}
"""Of steps that verify drafts. hook_scenarios_paired.py has them fail."""

ON_A_GPU = {
    "adapter/latent/protocol.py TailStarts.__init__": "start",
    "adapter/latent/protocol.py TailStarts.plan": "writing a plan",
    "adapter/latent/protocol.py Tails.__init__": "start",
    "adapter/latent/protocol.py Tails.workspace_bytes_for": "start",
    "adapter/latent/flashmla.py FlashMLALatent.allocate": "start",
    "adapter/latent/fp8.py FP8Latent.run": "in a layer",
    "adapter/latent/pool.py LatentPool.get_mla_kv_buffer": "SGLang's, of its pool",
    "adapter/step/backend.py HybridMLABackend._absorb_prefill": "in a layer, from 0.5.23 on",
    "adapter/ranks/ranks.py all_ranks_agree.agree": "choosing whether a pass is mixed, of several ranks",
    "adapter/step/layer.py around_eh_norm": "instead of SGLang's",
    "adapter/prefill/transient.py TransientExpansion._pieces.piece": "before a prefill pass",
    "adapter/ranks/sharded.py gather_over.gather": "a vote, of several ranks",
    "adapter/compat/sglang_0_5_23/plain_backend.py PlainBackend.__init__": "start, from 0.5.23 on",
    "adapter/compat/sglang_0_5_23/plain_backend.py PlainBackend.init_cuda_graph_state": "start, from 0.5.23 on",
    "adapter/stock/flashmla.py with_rows": "SGLang's prefill, where ranks divide heads and requests",
    "adapter/stock/torch_native.py TorchStock._extend_over_fp8": "plain absorb, over a cache in FP8",
    "adapter/stock/torch_native.py TorchTails.run": "in a layer, from 0.5.23 on",
    "adapter/stock/flashinfer_tails.py FlashInferTails._rows": "before a prefill pass, from 0.5.23 on",
    "adapter/stock/flashinfer_tails.py FlashInferTails.plan": "before a prefill pass, from 0.5.23 on",
    "kernels/absorb/grouped.py GroupedAbsorb.__init__": "start",
    "kernels/absorb/grouped.py GroupedAbsorb._in_strips": "in a layer",
    "kernels/absorb/grouped.py GroupedAbsorb._stage": "writing a plan",
    "kernels/absorb/grouped.py GroupedAbsorb.run": "in a layer",
    "kernels/absorb/grouped.py GroupedAbsorb.try_out": "start",
    "kernels/absorb/paged_fp8.py AbsorbFP8.__init__": "start",
    "kernels/absorb/paged_fp8.py AbsorbFP8.output": "in a layer",
    "kernels/absorb/paged_fp8.py AbsorbFP8.try_out": "start",
    "kernels/absorb/paged_fp8.py HopperAbsorbFP8.__init__": "start",
    "kernels/absorb/paged_fp8.py TritonAbsorbFP8.__init__": "start",
    "kernels/absorb/schedule.py empty_tail_table": "start",
    "kernels/absorb/schedule.py empty_work": "start",
    "kernels/absorb/schedule.py build_segment_work": "writing a plan",
    "kernels/dispatch.py whole_query": "in a layer",
    "kernels/kept_part.py KeptPart.__init__": "start, from 0.5.23 on",
    "kernels/naive/triton_attention.py TritonSharedAttention.__init__": "start",
    "kernels/naive/triton_attention.py TritonSharedAttention.make_plan": "planning",
    "kernels/naive/collectives.py Collectives.__init__": "start, of several ranks",
    "kernels/naive/peers.py symmetric_mailbox": "start, of several ranks",
    "kernels/naive/sharded.py ShardedAttention.__init__": "start",
    "kernels/naive/sharded.py ShardedAttention.try_out": "start",
    "kernels/partials.py PartialTable.empty": "start",
    "kernels/partials.py PartialTable.from_pairs": "writing a plan",
    "kernels/storage/expanded.py _token_to_position": "planning",
    "kernels/storage/latent_rows.py quantize": "SGLang's, of its pool",
    "kernels/storage/page_table.py fill_page_table_torch": "preparing a step",
}
"""Functions that allocate, and do not run in a life on the CPU, with what they are called in: a failure there comes out
where the life has it, too."""

OF_OTHER_TREES = {"adapter/compat/sglang_0_5_17/tree.py NodeTreeView.slots"}
"""They read the tree of another release."""

ALLOCATING = (
    *("arange", "cat", "empty", "empty_like", "full", "new_empty", "new_zeros", "ones", "pin_memory", "stack"),
    *("tensor", "zeros", "zeros_like"),
)

WITHOUT_ANOTHER_WAY = {"kernels/dispatch.py make_absorb_fp8.tried"}
"""Where a kernel is tried out that nothing else can do the work of: over a cache in FP8. It ends the launch."""


# ---- the process


def main(out: Path, which: str) -> None:
    """Live once to see what runs; then once with each failure. Writes what came of it.

    Args:
        which: "some", or "others".
    """
    from sglang_mla_ext.adapter.build import start as start_of_worker
    from sglang_mla_ext.adapter.compat.table import Feature
    from sglang_mla_ext.observe import Metrics

    hooked_worker.replace_bodies()
    hooked_worker.install()
    start_of_worker.assert_installed([Feature.MIXED])  # which is looked at once in a process
    fault_life.shorten_pauses()
    logging.getLogger("sglang_mla_ext").propagate = False  # thousands of tracebacks
    metrics = Metrics({"of": "tests"})
    start, watch = Watch(), Watch()
    with start.on():
        life = fault_life.Life(metrics)
    hooked_worker.CALLED.clear()
    with watch.on():
        life.until_a_flush()
        life.until_it_shares()
    counters = life.counters
    assert not counters.fallbacks and not counters.shadow_failures
    assert counters.steps_naive >= 10 and counters.prefills_naive == 2 and counters.shadow_checks >= 2
    assert (counters.prefills_mixed, counters.steps_mixed, counters.tokens_mixed) == (2, 1, 12)
    found: dict[str, Any] = {"hooked": sorted(start_of_worker.hooked), "called": sorted(hooked_worker.CALLED)}
    found |= {"start": list(start.places), "life": list(watch.places)}
    listed = DOORS | THE_NET | PLAIN_ABSORB
    firsts = {*{file_of(place): place for place in reversed(watch.functions)}.values(), *listed}
    # An operation that fails for good is a function that does.
    once = [(place, code, "once") for place, code in watch.places.items()]
    starting = [(place, code, "at the start") for place, code in start.functions.items()]
    for_good = [(place, code, "for good") for place, code in watch.functions.items()]
    some = [*once[::6], *starting[::6], *(fault for fault in for_good if fault[0] in firsts)]
    some += [fault for fault in once if without_line(fault[0]) in listed and fault not in some]
    faults = some if which == "some" else [fault for fault in (*for_good, *once, *starting) if fault not in some]
    gc.unfreeze()  # as the process was frozen that this is a fork of
    functions = functions_of([code for _, code, _ in faults if code is not None])
    gc.collect()
    gc.freeze()
    for number in range(PROCESSES):
        if not os.fork():
            outcomes = [(f[0], f[2], outcome(*f, functions, metrics)) for f in faults[number::PROCESSES]]
            out.with_suffix(f".{number}").write_text(json.dumps(outcomes))
            os._exit(0)
    for _ in range(PROCESSES):
        os.wait()
    parts = [json.loads(out.with_suffix(f".{number}").read_text()) for number in range(PROCESSES)]
    out.write_text(json.dumps({**found, "outcomes": [each for part in parts for each in part]}))


def outcome(place: str, code: Any, when: str, functions: Functions, metrics: Any) -> str:
    """Of a life with a failure; empty where it was as it should be."""
    fault, logged = Fault(place, code, functions, once=when == "once"), fault_life.Logged()
    logger = logging.getLogger("sglang_mla_ext")
    logger.addHandler(logged)
    try:
        if when == "at the start":
            try:
                with fault.on():
                    life = fault_life.Life(metrics)
                    fault.lift()
            except Exception:
                return ""  # the launch ends
            life.until_a_flush()
        else:
            life = fault_life.Life(metrics)
            with fault.on():
                life.until_a_flush(lambda: when == "once" and fault.strikes > 0)
                fault.lift()
            life.until_it_shares()
    except BaseException as error:
        return "it ended: " + "".join(traceback.format_exception(error))
    finally:
        logger.removeHandler(logged)
    counted = dict(life.counters.fallbacks)
    if not fault.strikes:
        return "it was not called"
    if not counted:
        return "it was not counted"
    codes = {message.partition("(")[2].partition(")")[0] for message in logged.messages}
    if set(logged.messages.values()) != {1} or codes != set(counted):
        return f"counted {counted}, and logged {dict(logged.messages)}"
    return ""


# ---- the tests


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Callable[[str], dict[str, Any]]:
    """What the process wrote."""

    def live(which: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("faults")
        printed = forks.run([sys.executable, __file__, str(folder / "found"), which], folder / "log", timeout_s=800)
        assert (folder / "found").exists(), printed[-5000:]
        result: dict[str, Any] = json.loads((folder / "found").read_text())
        return result

    return live


@pytest.fixture(scope="module")
def found(lived: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return lived("some")


def test_what_fails_in_a_running_server_reaches_nobody(found: dict[str, Any]) -> None:
    expected = DOORS | THE_NET | PLAIN_ABSORB
    running = [each for each in found["outcomes"] if each[1] != "at the start"]
    assert len(running) > 100
    assert_nobody_is_reached(running, expected)
    ended = {without_line(place) for place, _, what in running if what}
    assert ended == expected, "it is listed, and its failure is caught"


@pytest.mark.slow
def test_what_else_fails(lived: Callable[[str], dict[str, Any]]) -> None:
    outcomes = lived("others")["outcomes"]
    assert len(outcomes) > 500
    assert_nobody_is_reached(outcomes, DOORS | THE_NET | PLAIN_ABSORB)


def assert_nobody_is_reached(outcomes: Sequence[tuple[str, str, str]], expected: Collection[str]) -> None:
    wrong = [
        f"{place}, {when}: {what}" for place, when, what in outcomes if what and without_line(place) not in expected
    ]
    assert not wrong, f"{len(wrong)} failures, of which:\n" + "\n".join(wrong[:10])


def test_what_fails_at_the_start_ends_it_or_is_counted(found: dict[str, Any]) -> None:
    starting = [(place, what) for place, when, what in found["outcomes"] if when == "at the start"]
    assert len(starting) > 20
    wrong = [f"{place}: {what}" for place, what in starting if what]
    assert not wrong, f"{len(wrong)} failures, of which:\n" + "\n".join(wrong[:10])


def test_every_hook_of_a_running_server_is_among_them(found: dict[str, Any]) -> None:
    hooked = {target.split(".", 2)[-1]: target for target in found["hooked"]}
    short = {name: ".".join(name.rsplit(".", 2)[1:]) for name in hooked}
    not_called = {short[name] for name, target in hooked.items() if target not in found["called"]}
    assert not_called == START_HOOKS | INSTEAD_OF_SGLANGS | OF_OTHER_MODELS | REPLAYS


def test_every_allocation_has_a_place(found: dict[str, Any]) -> None:
    ran = {place.split(":")[0] for place in (*found["start"], *found["life"])}
    allocating = {name for name, _ in functions_that_call(ALLOCATING)}
    assert allocating - ran == ON_A_GPU.keys() | OF_DRAFTS | (set() if OLDEST else OF_OTHER_TREES)


def test_kernels_are_tried_out_where_a_failure_is_caught() -> None:
    tried = list(functions_that_call(["try_out"]))
    assert len(tried) == 7
    uncaught = {name for name, caught in tried if not caught and not name.endswith(".try_out")}
    assert uncaught == WITHOUT_ANOTHER_WAY


def file_of(place: str) -> str:
    """`file function` -> `file`"""
    return place.partition(" ")[0]


def without_line(place: str) -> str:
    """`file function:line` -> `file function:`"""
    name, colon, _ = place.partition(":")
    return name + colon


def functions_that_call(names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Of the adapter and the kernels, but those that stand in for what a GPU has, and those that run on it: the
    functions in whose source a call of such a name is, and whether all such calls are in a `try` of theirs."""
    for folder in ("sglang_mla_ext/adapter", "kernels"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            path = str(file.relative_to(REPOSITORY)).removeprefix("sglang_mla_ext/")
            if not path.startswith(("adapter/cpu/", "kernels/reference/")):
                yield from _calls(ast.parse(file.read_text(encoding="utf-8")), names, path, ())


def _calls(node: ast.AST, names: Any, path: str, within: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef | ast.FunctionDef):
            yield from _calls(inner, names, path, (*within, inner.name))
        elif not isinstance(inner, ast.expr | ast.arguments):
            yield from _calls(inner, names, path, within)
    if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(each) for each in node.decorator_list):
        own = [each for each in _own(node) if isinstance(each, ast.Call) and _name(each.func) in names]
        in_try = {
            id(each)
            for block in _own(node)
            if isinstance(block, ast.Try)
            for line in block.body
            for each in ast.walk(line)
        }
        if own:
            yield f"{path} {'.'.join(within)}", all(id(call) in in_try for call in own)


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes of a function, without those of functions in it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef):
            yield node
            waiting += ast.iter_child_nodes(node)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
