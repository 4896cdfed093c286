"""An OpenAI-compatible server over one arena: completions, chat completions, metrics, and a live map of the arena.

    python examples/serve.py --tiny gpt_oss --memory 8MiB
    python examples/serve.py --model Qwen/Qwen3.5-4B --memory 40GiB --host-memory 64GiB --overlap

Then http://127.0.0.1:8000 shows the arena, and clients of OpenAI's API find it at http://127.0.0.1:8000/v1. What it
needs is installed by `pip install -e '.[serve]'`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import tiny_models
import torch
import uvicorn
from server.app import make_app
from server.engine import Engine
from server.metrics import Metrics
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torch_uma import ServingLoop, TorchUmaError

SHUTDOWN_SECONDS = 3  # for answers that are being given to end


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="PATH", help="a folder or a name of the Hugging Face hub")
    which.add_argument("--tiny", choices=tiny_models.BUILDERS, help="a tiny random model, which downloads nothing")
    parser.add_argument("--name", help="what clients call the model; by default as above")
    parser.add_argument("--dtype", default="auto", help="of the weights, as torch calls it (auto: as they are stored)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--attention", default="torch_uma", help="attn_implementation of the model (%(default)s)")
    parser.add_argument("--memory", help="of the arena: bytes, or 8GiB (half of what is free)")
    parser.add_argument("--host-memory", default="0", help="for requests that are retracted (0: computed again)")
    parser.add_argument("--max-running", type=int, default=64, help="requests in memory at once (%(default)s)")
    parser.add_argument("--max-waiting", type=int, default=256, help="others that may wait (%(default)s)")
    parser.add_argument("--step-tokens", type=int, default=2048, help="tokens of all forwards of a step (%(default)s)")
    parser.add_argument("--max-request-tokens", type=int, help="of a prompt and its answer (what memory can hold)")
    parser.add_argument("--headroom-steps", type=int, default=16, help="room left when one comes in (%(default)s)")
    parser.add_argument("--max-answers", type=int, default=16, help="that one HTTP request may ask for (%(default)s)")
    parser.add_argument("--max-body-bytes", type=int, default=1 << 20, help="of an HTTP request (%(default)s)")
    parser.add_argument("--overlap", action="store_true", help="launch a step before the one before has been read")
    parser.add_argument("--compile", action="store_true", help="decode by torch.compile")
    parser.add_argument("--log-level", default="info", help="of uvicorn (%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="(%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="(%(default)s)")
    return parser


def load(given: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The model, ready to generate, and its tokenizer."""
    tokenizer: Any
    if given.tiny:
        model, tokenizer = tiny_models.build(given.tiny), tiny_models.tokenizer()
        assert model.generation_config is not None
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    else:
        tokenizer = AutoTokenizer.from_pretrained(given.model)
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype)
    model.set_attn_implementation(given.attention)
    return model.to(given.device).eval().requires_grad_(False), tokenizer


def serve(given: argparse.Namespace) -> None:
    """Load, and answer until it is interrupted."""
    model, tokenizer = load(given)
    make_loop = partial(
        ServingLoop,
        model,
        memory=given.memory,
        max_running=given.max_running,
        step_tokens=given.step_tokens,
        max_request_tokens=given.max_request_tokens,
        headroom_steps=given.headroom_steps,
        host_memory=given.host_memory,
        overlap=given.overlap,
        compile=given.compile,
    )
    with Engine(
        make_loop, partial(tokenizer.decode, skip_special_tokens=True), Metrics(), max_waiting=given.max_waiting
    ) as engine:
        positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        app = make_app(
            engine,
            tokenizer,
            name=given.name or given.model or given.tiny,
            max_request_tokens=min(engine.max_request_tokens, positions or engine.max_request_tokens),
            defaults=model.generation_config,
            max_answers=given.max_answers,
            max_body_bytes=given.max_body_bytes,
        )
        uvicorn.run(
            app, host=given.host, port=given.port, timeout_graceful_shutdown=SHUTDOWN_SECONDS, log_level=given.log_level
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options()
    given = parser.parse_args(arguments)
    try:
        serve(given)
    except (TorchUmaError, OSError) as error:  # what was asked for cannot be had
        parser.exit(1, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
