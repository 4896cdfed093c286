"""Speculative decoding as a `custom_generate` of transformers: the loop, for models with recurrent states as well.

Owns one thing that the loop of transformers cannot have: after a candidate is refused, a recurrent state goes back to
its checkpoint, and the tokens behind that are run again together with the next candidates. Candidates, logits
processors and stopping criteria are those of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator
from transformers.generation.utils import GenerateDecoderOnlyOutput

from torch_uma.counts import whole
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.cache import UnifiedCache
from torch_uma.integrations.transformers.versions import CACHE

_MOST_PENDING = 8
"""So many tokens may wait to be run again; then they are run without candidates, which nothing can take back."""


def speculate(
    model: Any,
    input_ids: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    assistant: Any = None,
    assistant_cache: UnifiedCache | None = None,
    **model_kwargs: Any,
) -> Any:
    """Generates the same tokens with fewer forwards: `model.generate(..., cache=cache, custom_generate=speculate)`.

    Candidates come from the text itself with `prompt_lookup_num_tokens=` (behind an n-gram of `max_matching_ngram_size`
    at most, 2 by default), or from a smaller model with `assistant=`, whose vocabulary is the same and whose cache, one
    of transformers or an `assistant_cache=`, can be cropped. Greedy tokens are those of greedy decoding; with
    `do_sample` a candidate is kept if it is the token that was sampled, so the distribution is that of sampling. The
    batch is one sequence.

    Returns what `generate()` returns, without attentions and hidden states. The cache stands as after `generate()`.
    Synchronises with the device. PlanError for arguments that do not go together, SequenceError for another batch;
    OutOfMemory.
    """
    cache = _cache_of(model_kwargs)
    if input_ids.shape[0] != 1:
        raise SequenceError(
            f"speculation is for one sequence, and this batch has {input_ids.shape[0]}; call generate() for each, or "
            "without custom_generate"
        )
    restarted_by = next((layer.restarted_by for layer in cache._declared if layer.restarted_by), None)
    if restarted_by is not None:
        raise PlanError(
            f"{restarted_by} starts its recurrent states anew in a forward of several tokens, so it cannot look at "
            "candidates; generate without custom_generate"
        )
    if generation_config.output_attentions or generation_config.output_hidden_states:
        raise PlanError("speculation returns no attentions and no hidden states; generate without custom_generate")
    if prompt_lookup_num_tokens is None:
        prompt_lookup_num_tokens = generation_config.prompt_lookup_num_tokens
    if (prompt_lookup_num_tokens is None) == (assistant is None):
        raise PlanError(
            "speculation needs candidates: give either prompt_lookup_num_tokens= or assistant= (transformers does not "
            "hand on assistant_model= to a custom_generate)"
        )
    if max_matching_ngram_size is None:
        max_matching_ngram_size = generation_config.max_matching_ngram_size or 2
    generator: Any
    if assistant is None:
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=whole(prompt_lookup_num_tokens, "prompt_lookup_num_tokens", least=1, error=PlanError),
            max_matching_ngram_size=whole(max_matching_ngram_size, "max_matching_ngram_size", least=1, error=PlanError),
            max_length=generation_config.max_length,
            logits_processor=logits_processor,
            vocab_size=model.config.get_text_config().vocab_size,
        )
    else:
        _check_assistant(model, assistant, assistant_cache)
        # It is first asked behind the token that the prompt gives.
        kwargs = {name: value for name, value in model_kwargs.items() if value is not cache}
        kwargs = model._update_model_kwargs_for_generation({}, kwargs)
        generator = AssistedCandidateGenerator(
            input_ids, assistant, generation_config, kwargs, logits_processor=logits_processor
        )
        if assistant_cache is not None:
            assistant_cache.reset()
            assistant_cache.activate_past_recording()
            generator.assistant_kwargs[CACHE] = assistant_cache
    run = _Run(model, cache, input_ids, generation_config, model_kwargs)
    return run.decode(generator, logits_processor, stopping_criteria)


class _Run:
    """One call: its forwards over the cache, which holds `offset` tokens more in front than `input_ids` shows."""

    def __init__(
        self, model: Any, cache: UnifiedCache, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> None:
        self._model = model
        self._cache = cache
        self._input_ids = input_ids
        self._config = generation_config
        self._model_kwargs = model_kwargs
        self._offset = 0
        self._fed_tokens = 0
        self._num_sure: int | None = None  # tokens that the cache may hold as they are in the text; None for all

    def decode(self, generator: Any, logits_processor: Any, stopping_criteria: Any) -> Any:
        """Generates until a criterion stops it, and returns what `generate()` returns.

        Whatever is raised meanwhile, the cache holds no token then that is merely likely.
        """
        try:
            return self._decode(generator, logits_processor, stopping_criteria)
        except BaseException:
            if self._num_sure is not None and self._num_held() > self._num_sure:
                self._take_back(self._num_held() - self._num_sure)
            self._cache.deactivate_past_recording()
            raise

    def _decode(self, generator: Any, logits_processor: Any, stopping_criteria: Any) -> Any:
        ids = drafted = self._input_ids
        logits = self._prefill()
        is_told = self._config.return_dict_in_generate
        all_logits: tuple[torch.Tensor, ...] | None = () if is_told and self._config.output_logits else None
        all_scores: tuple[torch.Tensor, ...] | None = () if is_told and self._config.output_scores else None
        is_done = False
        while True:
            num_candidates = drafted.shape[1] - ids.shape[1]
            logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
            ends = range(ids.shape[1], drafted.shape[1] + 1)
            each = [logits_processor(drafted[:, :end], logits[:, place].clone()) for place, end in enumerate(ends)]
            scores = torch.stack(each, dim=1)
            chosen = self._choose(scores)
            is_same = drafted[:, ids.shape[1] :] == chosen[:, :-1]
            num_accepted = int(is_same.long().cumprod(dim=1).sum())
            for place, token in enumerate(chosen[:, : num_accepted + 1].split(1, dim=1)):
                num_accepted = place
                self._num_sure = ids.shape[1] + self._offset
                ids = torch.cat([ids, token], dim=1)
                all_logits = None if all_logits is None else (*all_logits, logits[:, place])
                all_scores = None if all_scores is None else (*all_scores, scores[:, place])
                is_done = bool(stopping_criteria(ids, all_scores).all())
                if is_done:
                    break
            self._take_back(num_candidates - num_accepted)
            if num_candidates:
                generator.update_candidate_strategy(ids, scores, num_accepted)
            if is_done:
                break
            drafted = self._with_candidates(ids, generator)
            logits = self._forward(drafted, drafted.shape[1] - ids.shape[1])
        if self._num_pending(ids) > 1:
            self._forward(ids[:, :-1], 0)
        self._cache.deactivate_past_recording()
        if not is_told:
            return ids
        output: Any = GenerateDecoderOnlyOutput
        return output(sequences=ids, scores=all_scores, logits=all_logits, **{CACHE: self._cache})

    def _prefill(self) -> torch.Tensor:
        """Runs the prompt: the logits [1, 1, vocabulary] of its last token."""
        self._cache.deactivate_past_recording()
        logits: torch.Tensor = self._model._prefill(self._input_ids, self._config, self._model_kwargs).logits[:, -1:]
        self._offset = self._num_held() - self._input_ids.shape[1]
        return logits

    def _num_held(self) -> int:
        return int(self._cache.get_seq_length())

    def _num_pending(self, ids: torch.Tensor) -> int:
        """Tokens that the cache does not hold; of text that goes on, the last one is always among them."""
        return ids.shape[1] + self._offset - self._num_held()

    def _with_candidates(self, ids: torch.Tensor, generator: Any) -> torch.Tensor:
        if self._num_pending(ids) > _MOST_PENDING:
            return ids
        drafted: torch.Tensor = generator.get_candidates(ids)[0]
        return drafted[:, : self._config.max_length - 1].to(ids.device)

    def _forward(self, ids: torch.Tensor, num_candidates: int) -> torch.Tensor:
        """Runs the tokens that the cache does not hold: the logits [1, num_candidates + 1, vocabulary] of the last."""
        self._fed_tokens = self._num_pending(ids)
        self._num_sure = ids.shape[1] + self._offset - num_candidates
        if num_candidates:
            self._cache.activate_past_recording(num_candidates if self._cache.is_croppable else self._fed_tokens)
        else:
            self._cache.deactivate_past_recording()
        num_new = ids.shape[1] - self._input_ids.shape[1]
        kwargs = self._model._update_model_kwargs_for_generation({}, dict(self._model_kwargs), num_new_tokens=num_new)
        inputs = self._model.prepare_inputs_for_generation(ids, next_sequence_length=self._fed_tokens, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = num_candidates + 1
        logits: torch.Tensor = self._model(**inputs, return_dict=True).logits[:, -(num_candidates + 1) :]
        return logits

    def _take_back(self, num_refused: int) -> None:
        """Has the cache without the last `num_refused` tokens or, if its states cannot, without the last forward."""
        is_exact = num_refused == 0 or self._cache.is_croppable
        self._cache.crop(-num_refused if is_exact else -self._fed_tokens)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        """The token [1, places] that the model chooses at each place of [1, places, vocabulary]."""
        if not self._config.do_sample:
            return scores.argmax(dim=-1)
        return torch.multinomial(scores[0].softmax(dim=-1), num_samples=1).T


def _cache_of(model_kwargs: dict[str, Any]) -> UnifiedCache:
    """The cache, whatever this model calls it in this version of transformers."""
    for value in model_kwargs.values():
        if isinstance(value, UnifiedCache) and model_kwargs.get("use_cache", True):
            return value
    raise PlanError("speculation takes back what a cache holds; give generate() cache=torch_uma.UnifiedCache(model)")


def _check_assistant(model: Any, assistant: Any, cache: UnifiedCache | None) -> None:
    sizes = [each.config.get_text_config().vocab_size for each in (model, assistant)]
    if sizes[0] != sizes[1]:
        raise PlanError(
            f"the assistant has {sizes[1]} tokens in its vocabulary and the model {sizes[0]}; use one with the same"
        )
    if assistant._is_stateful or (cache is not None and not cache.is_croppable):
        raise PlanError(
            f"the states of the assistant {type(assistant).__name__} cannot take back any number of tokens; use an "
            "assistant without recurrent layers, or prompt_lookup_num_tokens="
        )
