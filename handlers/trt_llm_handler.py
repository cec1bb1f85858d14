"""Language models on TensorRT-LLM.

    handler:
        engine_dir: model-engine            # written by trtllm-build, or a model of Hugging Face
        tokenizer_dir: /models/llama
        kv_cache_config: {free_gpu_memory_fraction: 0.1}
        llm_config: {max_batch_size: 4}     # not in TorchServe: other arguments of tensorrt_llm.LLM

A request is ``{"prompt": …, "streaming": false}``; its other keys are sampling parameters. A stream
has one JSON text ``{"text": …}`` per piece and an empty last piece.
"""

import json
from typing import Any

from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.handlers.engines.llm_handler import LLMHandler, send_piece
from marserve.handlers.engines.optional import need

_WHO = "trt_llm_handler"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # an incomplete character at the end of a text


class TRTLLMHandler(LLMHandler):
    """Answers prompts with a model on TensorRT-LLM."""

    def __init__(self) -> None:
        super().__init__()
        self.trt_llm_engine: Any = None  # tensorrt_llm.LLM
        self.tokenizer: Any = None
        self._sampling_params: Any = None

    def initialize(self, context: Context) -> None:
        """Load tokenizer and engine."""
        settings = self.read_settings(context)
        if not settings.get("engine_dir"):
            raise ValueError("model-config.yaml lacks handler.engine_dir")
        # The second is the name until 0.13.
        library = need("tensorrt_llm.llmapi", "tensorrt_llm", _WHO, "tensorrt_llm.hlapi")
        self._sampling_params = library.SamplingParams
        self.tokenizer = _tokenizer(settings.get("tokenizer_dir") or settings["engine_dir"])
        self.trt_llm_engine = library.LLM(
            model=settings["engine_dir"],
            tokenizer=self.tokenizer,
            kv_cache_config=library.KvCacheConfig(**(settings.get("kv_cache_config") or {})),
            **(settings.get("llm_config") or {}),
        )
        self.initialized = True

    async def inference(self, data: Any, context: Context) -> list[str]:
        """Return a list with the text; of a stream, with an empty last piece."""
        if not isinstance(data, dict) or "prompt" not in data:
            raise PredictionException('The request is not a JSON object with a "prompt"', 400)
        chosen = dict(data)
        prompt, streaming = chosen.pop("prompt"), bool(chosen.pop("streaming", False))
        ends = {"end_id": self.tokenizer.eos_token_id, "pad_id": self.tokenizer.pad_token_id}
        outputs = self.trt_llm_engine.generate_async(
            prompt, sampling_params=self._sampling_params(**{**ends, **chosen}), streaming=streaming
        )
        if not streaming:
            return [(await outputs).outputs[0].text]
        await self._stream(outputs, context)
        return [""]

    async def _stream(self, outputs: Any, context: Context) -> None:
        sent = text = ""
        async for output in outputs:
            text = output.outputs[0].text
            if not text.endswith(_UNFINISHED):
                await _send(text[len(sent) :], context)
                sent = text
        await _send(text[len(sent) :], context)


async def _send(piece: str, context: Context) -> None:
    if piece:
        await send_piece(json.dumps({"text": piece}), context)


def _tokenizer(directory: str) -> Any:
    """Load a tokenizer that pads on the left, as generation requires."""
    transformers = need("transformers", "transformers", _WHO)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory,
        legacy=False,
        padding_side="left",
        truncation_side="left",
        trust_remote_code=True,
        use_fast=True,
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer
