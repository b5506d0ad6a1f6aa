"""Scenarios of test_plugin.py, each in a fork: `MODEL OUT`, and `OUT/SCENARIO.json` has what it saw."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys

import sglang.srt.server_args as server_args
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.utils import common

from sglang_mla_ext.adapter.cpu import stubs

os.environ.pop(stubs.INSTALLED_VARIABLE, None)
common.get_cpu_memory_capacity = lambda: 24576.0  # MiB; a virtual machine's own changes while the children run

MODEL, ASKED, MODE = sys.argv[1], "SGLANG_HYBRID_MLA_ASKED", "SGLANG_HYBRID_MLA_MODE"
COMMON = {"model_path": MODEL, "device": "cpu", "random_seed": 1}


def resolved(args):
    # With 0.5.23, who launches a server asks for it, and the result is beside what was given.
    if hasattr(args, "resolve_once"):
        args.resolve_once()
    return args


def change(args, **kwargs):
    for name in ("override", "_late_resolution"):
        if hasattr(args, name):
            return getattr(args, name)("a test", **kwargs)
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(args, "a test", **kwargs)


def launch(**kwargs):
    try:
        args = resolved(server_args.ServerArgs(**{**COMMON, **kwargs}))
    except Exception as error:
        return [type(error).__name__, str(error)]
    values = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
    return {name: re.sub(" at 0x[0-9a-f]+", "", repr(value)) for name, value in sorted(values.items())}


def seen():
    return {
        "backends": {name: f"{f.__module__}.{f.__qualname__}" for name, f in sorted(ATTENTION_BACKENDS.items())},
        "handlers": {
            name: f"{f.__module__}.{f.__qualname__}" for name, f in sorted(AttentionBackendRegistry._handlers.items())
        },
        "query in parts": FORWARD_ABSORB_CORE_ATTENTION_BACKENDS,
        "hooked": sorted(HookRegistry._patched),
        "choices": sorted(server_args.ATTENTION_BACKEND_CHOICES),
        "asked": os.environ.get(ASKED),
        "hooks imported": "sglang_mla_ext.adapter.step.hooks" in sys.modules,
    }


def scenario_without():
    os.environ["SGLANG_PLUGINS"] = "none"
    load_plugins()
    return {"args": launch(attention_backend="torch_native"), "default": launch(), **seen()}


def scenario_not_asked():
    load_plugins()
    return {"args": launch(attention_backend="torch_native"), "default": launch(), **seen()}


def scenario_not_asked_but_broken():
    os.environ[MODE] = "nonsense"
    from sglang_mla_ext.adapter.compat import contract, installed

    assert installed.RESOLVED_BY  # the release has been chosen
    contract.SUPPORTED = {"99.0": contract.table()}
    load_plugins()
    return {"args": launch(attention_backend="torch_native"), "asked for": launch(attention_backend="hybrid_mla")}


def scenario_help():
    load_plugins()
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    return parser.format_help()


def scenario_asked():
    load_plugins()
    flags = ["--model-path", MODEL, "--device", "cpu", "--decode-attention-backend", "hybrid_mla"]
    flags += ["--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", "7"]
    args = resolved(server_args.prepare_server_args(flags))
    before = {name: value for name, value in os.environ.items() if name.startswith("SGLANG_HYBRID_MLA")}
    launch(attention_backend="torch_native")
    return {"decode": args.decode_attention_backend, "env": before, **seen()}


def scenario_flags_in_vain():
    import logging

    warned, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("sglang_mla_ext").addHandler(handler)
    load_plugins()
    launch(attention_backend="torch_native")
    before = list(warned)
    flags = ["--model-path", MODEL, "--device", "cpu", "--attention-backend", "torch_native"]
    flags += ["--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", "7"]
    resolved(server_args.prepare_server_args(flags))
    return {"without flags": before, "with flags": warned}


def scenario_bad_launches():
    load_plugins()
    bad = {
        "radix": launch(attention_backend="hybrid_mla", disable_radix_cache=True),
        "prefill": launch(prefill_attention_backend="hybrid_mla", decode_attention_backend="torch_native"),
    }
    os.environ[MODE] = "nonsense"
    bad["mode"] = launch(attention_backend="hybrid_mla")
    return {**bad, **seen()}


def scenario_dp_routing():
    load_plugins()
    os.environ["SGLANG_HYBRID_MLA_DP_ROUTING"] = "prefix"
    launch(attention_backend="torch_native", dp_size=2)
    launch(attention_backend="hybrid_mla")
    before = seen()["hooked"]
    refused = launch(attention_backend="hybrid_mla", dp_size=2, tokenizer_worker_num=2)
    launch(attention_backend="hybrid_mla", dp_size=2)
    launch(attention_backend="hybrid_mla", dp_size=2)
    return {"refused": refused, "more": sorted({*seen()["hooked"]} - {*before})}


def scenario_speculation():
    # Checked as on a GPU, and resolved on a CPU beside SGLang's own backend.
    load_plugins()
    from sglang_mla_ext.adapter.launch import limits
    from sglang_mla_ext.adapter.server import Server
    from sglang_mla_ext.options import HybridMLAOptions, OptionError

    draft = os.path.join(os.path.dirname(MODEL), "draft")
    found = {}
    for name, kwargs in {
        "nextn": {"speculative_algorithm": "nextn"},
        "two steps": {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 2,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 3,
        },
        "many steps": {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 8,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        },
        "another draft": {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": draft},
        "adaptive": {"speculative_algorithm": "EAGLE", "speculative_adaptive": True},
    }.items():
        args = resolved(server_args.ServerArgs(**COMMON, attention_backend="torch_native", **kwargs))
        change(args, device="cuda")
        limits.set_draft_backend(args)
        change(args, attention_backend="hybrid_mla")
        checked = Server.of(args, HybridMLAOptions())
        vars(checked.device).update(memory_bytes=None, capability=(9, 0))
        try:
            limits.check(checked)
        except OptionError as error:
            found[name] = str(error)
        else:
            tokens, args = limits.installed.draft_tokens(args), limits.installed.resolved(args)
            found[name] = [args.speculative_algorithm, tokens, args.speculative_draft_attention_backend]
    ours = dict(attention_backend="hybrid_mla", speculative_algorithm="EAGLE")
    tree = dict(speculative_num_steps=3, speculative_eagle_topk=4, speculative_num_draft_tokens=8)
    found["tree"] = launch(**ours, **tree)
    without = resolved(server_args.ServerArgs(**COMMON, attention_backend="torch_native"))
    found["without"] = limits.installed.draft_tokens(without)
    return found


def scenario_worker():
    os.environ[ASKED] = "1"
    if stubs.needed():
        os.environ[stubs.INSTALLED_VARIABLE] = "1"
    load_plugins()
    from sglang_mla_ext.adapter.build import start
    from sglang_mla_ext.adapter.compat import contract
    from sglang_mla_ext.adapter.compat.table import dotted
    from sglang_mla_ext.adapter.step import hooks

    start.assert_installed()
    return {
        "ours": sorted(start.hooked),
        "features": {target: feature.name for target, feature in start.hooked.items()},
        "table": {contract.table().path_of(dotted(hook.target)): hook.feature.name for hook in hooks.table()},
        "contract": [use.path for use in contract.table().uses],
        "differences while hooked": contract.mismatches(),
        **seen(),
    }


def scenario_other_features_gone():
    # A worker beside an SGLang that lacks what only HiCache, PD servers and small drafts use.
    import logging
    import types

    from sglang.srt.managers.cache_controller import HiCacheController

    from sglang_mla_ext.adapter.compat import contract
    from sglang_mla_ext.adapter.compat.table import Changes, Feature

    gone = (Feature.HOST_CACHE, Feature.DISAGGREGATION, Feature.SMALL_DRAFTS)
    here = contract.table()
    renamed = {use.path: use.path + "_of_old" for use in here.uses if use.feature in gone}
    contract.SUPPORTED = {contract.installed_version(): here.after(Changes(renamed=renamed))}
    del HiCacheController.start_loading
    errors, handler = [], logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    os.environ[ASKED] = "1"
    if stubs.needed():
        os.environ[stubs.INSTALLED_VARIABLE] = "1"
    load_plugins()
    import torch

    from sglang_mla_ext.adapter.build import start

    start.assert_installed()
    runner = types.SimpleNamespace(is_draft_worker=False, dtype=torch.float32, kv_cache_dtype=torch.float32)
    refusals = {}
    for name, args in {"plain": {}, "host cache": {"enable_hierarchical_cache": True}}.items():
        runner.server_args = types.SimpleNamespace(device="cpu", **args)
        try:
            start.create_backend(runner)
        except contract.ContractError as error:
            refusals[name] = str(error)
    return {"errors": errors, "refusals": refusals, "renamed": list(renamed), **seen()}


for name, scenario in [item for item in globals().items() if item[0].startswith("scenario_")]:
    child = os.fork()
    if child == 0:
        try:
            with open(os.path.join(sys.argv[2], name.removeprefix("scenario_") + ".json"), "w") as file:
                json.dump(scenario(), file)
        except BaseException as error:
            print(f"{name}: {error!r}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(child, 0)
