"""Configurations of known models, for launch lines that name a model which is not at hand: SGLang reads the
configuration when it resolves its arguments, and would download it."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang_mla_ext.configs import config_names, did_you_mean, read_config

HUB_TIMEOUT_S = 5.0


def known_as(model: str) -> str | None:
    """The name on Hugging Face that a model's path stands for: that name itself, or a folder of the last part of it.
    None where it is not known."""
    names, last = _known(), _last_part(model)
    return model if model in names else next((name for name in names if _last_part(name) == last), None)


def out_of_reach(model: str) -> str | None:
    """Explain why an unknown model cannot be examined, and what to do; None where SGLang can read its configuration."""
    if Path(model).expanduser().exists() or "://" in model or os.environ.get("SGLANG_USE_MODELSCOPE"):
        return None
    if (why := _not_at_hub(model)) is None:
        return None
    names = {_last_part(name): name for name in reversed(_known())}
    meant = did_you_mean(_last_part(model), names)
    return f"{model} is neither a folder here nor a known model{why}: give a folder with its config.json.{meant}"


def _not_at_hub(model: str) -> str | None:
    """Return why a configuration does not come from Hugging Face, as the end of a sentence, which may be empty; None
    where it does."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return None
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=HUB_TIMEOUT_S)
    except errors.EntryNotFoundError:
        return None  # SGLang reads other files of some models
    except errors.HFValidationError:
        return ""
    except (errors.RepositoryNotFoundError, errors.GatedRepoError):
        return ", and Hugging Face has no such model, or wants a token for it"
    except Exception as error:  # of whichever HTTP library
        return f", and Hugging Face does not answer ({type(error).__name__})"
    return None


def _known() -> dict[str, str]:
    """Names on Hugging Face of all known models, and the shipped configuration of each."""
    configs = config_names("checkpoints")
    return {name: config for config in configs for name in read_config("checkpoints", config)["names"]}


def write_config(model: str, folder: Path) -> Path:
    """Write a known model's `config.json` below `folder`.

    Returns:
        the folder that it is in, to launch with.
    """
    config = _known()[model]
    # SGLang takes some folders for Mistral's own format by their names.
    written = folder / f"checkpoint-{config_names('checkpoints').index(config)}"
    written.mkdir(exist_ok=True)
    checkpoint = read_config("checkpoints", config)
    (written / "config.json").write_text(json.dumps(checkpoint["config"]), encoding="utf-8")
    return written


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()
