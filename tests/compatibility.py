"""Which kind of memory goes with which way of using it, as data: the tests that show it, and what is refused.

`KINDS` are the rows of the page and `WAYS` its columns. A test is named as `file::function[parameter]`, without
"tests/", "test_" and ".py"; a refusal by the name of a case in `refusals.py`, after "!", with a condition before it.
A test after "~" shows that steps are left as they are.
"""

from __future__ import annotations

KINDS: dict[str, str] = {
    "full": "full attention",
    "window": "windows",
    "chunk": "chunks",
    "latent": "latents (MLA)",
    "compressed": "compressed groups",
    "index": "index keys",
    "state": "states, convolutions",
    "restart": "states that start anew",
    "loop": "looped layers",
    "devices": "several devices",
}

WAYS: dict[str, dict[str, str]] = {
    "Under `generate()` and in loops": {
        "generate": "`generate()`",
        "fork": "beams, forks",
        "pieces": "prompt in pieces",
        "crop": "crop",
        "speculation": "speculation",
        "step": "`pool.step`",
        "packed": "packed rows",
    },
    "Attention, graphs and dtypes": {
        "stock": "stock attention",
        "in_place": "`torch_uma`",
        "flashinfer": "FlashInfer",
        "compile": "`torch.compile`",
        "multistep": "multi-steps",
        "fp8": "`kv_dtype` fp8",
    },
    "Serving": {
        "overlap": "overlap",
        "drop": "retraction, dropped",
        "offload": "retraction, offloaded",
        "preempt": "preemption",
        "batch": "`generate_batch`",
        "server": "server",
        "compiled": "compiled steps",
    },
}

_UNEVEN = "uneven::every_sequence_has_the_logits_that_it_has_alone"
_WAYS = "ways::greedy_and_sampled", "ways::beams_share_full_pages", "ways::a_chat_of_three_turns_and_its_fork"
_LOOP = "loop::sequences_come_fork_and_go_while_pages_move"
_ATTENTION = "attention::generate_gives_the_tokens_of_stock_attention_while_pages_move"
_SPECULATION = "speculation::tokens_are_those_of_greedy_decoding"
_CROP = "ways::tokens_are_taken_back_where_nothing_went"
_IN_PLACE_GRAPH = "compile::one_graph_a_batch_size_through_windows_moves_new_sequences_and_another_pool"
_STOCK_GRAPH = "fixed::one_graph_a_batch_size_through_windows_and_in_another_pool"
_MULTI = "multistep::a_greedy_decode_gives_the_tokens_of_generate"
_REPLAY = "multistep::the_host_replays_what_the_device_has_handed_out"
_FP8 = "precision::tokens_are_those_of_a_cache_that_rounds"
_INDEXED = "index::tokens_are_those_of_the_default_cache_while_pages_move"
_DECODERS = "models::tokens_are_those_of_the_oracle_or_the_type_is_refused"
_DEVICES = "devices::tokens_are_those_of_the_default_cache"
_SERVED = "serving::tokens_are_those_of_each_prompt_alone"
_BATCH = "compatibility::a_batch_over_little_memory"
_IN_THE_NEXT_ROUND = "scheduler_memory::a_more_important_request_begins_in_the_next_round_where_memory_is_full"
_STREAMS = "serve::many_streams_a_third_of_which_are_cut_off"

# Models that `test_compatibility.py` serves, with their attention, and memory of the host for those who are retracted.
SERVED: tuple[tuple[str, str, int | str], ...] = (
    ("llama4", "torch_uma", 0),
    ("llama4", "torch_uma", "1MiB"),
    ("deepseek_v3", "torch_uma", "1MiB"),
    ("deepseek_v4", "eager", 0),
    ("axk2", "torch_uma", 0),
    ("axk2", "torch_uma", "1MiB"),
    ("mamba", "eager", 0),
    ("dory", "torch_uma", 0),
    ("dory", "torch_uma", "1MiB"),
)

CELLS: dict[str, dict[str, tuple[str, ...]]] = {
    "full": {
        "generate": (f"{_WAYS[0]}[llama]",),
        "fork": (f"{_WAYS[1]}[llama]", f"{_WAYS[2]}[llama]"),
        "pieces": ("ways::a_prompt_in_chunks[llama]",),
        "crop": (f"{_CROP}[llama]",),
        "speculation": (f"{_SPECULATION}[llama]",),
        "step": (f"{_LOOP}[gpt_oss]", "uneven::prompts_join_while_others_decode[llama]"),
        "packed": (f"{_UNEVEN}[llama]", "with stock attention!packed_by_stock_attention"),
        "stock": (f"{_WAYS[0]}[llama]",),
        "in_place": (f"{_ATTENTION}[llama]",),
        "flashinfer": (
            "flashinfer::what_is_given_means_the_same_attention",
            "flashinfer::a_model_attends_by_flashinfer_where_its_cache_is_not_on_the_host",
        ),
        "compile": (f"{_IN_PLACE_GRAPH}[llama]", f"{_STOCK_GRAPH}[llama]"),
        "multistep": (
            f"{_MULTI}[llama]",
            "multistep::all_steps_are_one_graph_for_every_multi_step[llama]",
            "with stock attention!multistep_by_stock_attention",
        ),
        "fp8": (f"{_FP8}[llama]", "flashinfer::keys_of_fp8_have_the_scales_of_their_layer"),
        "overlap": (f"{_SERVED}[llama]",),
        "drop": (f"{_SERVED}[llama]",),
        "offload": (f"{_SERVED}[llama]",),
        "preempt": (f"{_IN_THE_NEXT_ROUND}[full]",),
        "batch": ("batch_generation::several_answers_to_one_prompt_lie_side_by_side",),
        "server": (f"{_STREAMS}[gpt_oss]",),
        "compiled": (
            "serving::compiled_decode_steps_have_a_graph_for_each_of_a_few_sizes",
            "with stock attention!compiled_loop_by_stock_attention",
        ),
    },
    "window": {
        "generate": (f"{_WAYS[0]}[gemma2]",),
        "fork": (f"{_WAYS[1]}[gpt_oss]", f"{_WAYS[2]}[gemma2]"),
        "pieces": ("ways::a_prompt_in_chunks[gemma2]",),
        "crop": (
            f"{_CROP}[gemma2]",
            "recording::what_was_taken_back_was_never_there[mistral]",
            "further than its pages reach!crop_behind_a_window",
        ),
        "speculation": (f"{_SPECULATION}[mistral]",),
        "step": (f"{_LOOP}[gpt_oss]",),
        "packed": (f"{_UNEVEN}[mistral]",),
        "stock": (f"{_WAYS[0]}[gemma2]", "sled::a_window_is_a_view_at_nearly_every_step"),
        "in_place": (f"{_ATTENTION}[gpt_oss]", f"{_ATTENTION}[mistral]"),
        "flashinfer": (
            "flashinfer::what_is_given_means_the_same_attention",
            "flashinfer::nan_before_a_window_reaches_the_output_only_where_that_is_vouched_for",
        ),
        "compile": (f"{_IN_PLACE_GRAPH}[gpt_oss]", f"{_STOCK_GRAPH}[mistral]"),
        "multistep": (f"{_MULTI}[gpt_oss]", "multistep::all_steps_are_one_graph_for_every_multi_step[gpt_oss]"),
        "fp8": (f"{_FP8}[mistral]",),
        "overlap": (f"{_SERVED}[gpt_oss]",),
        "drop": (f"{_SERVED}[gpt_oss]",),
        "offload": (f"{_SERVED}[gpt_oss]",),
        "preempt": (
            f"{_IN_THE_NEXT_ROUND}[window_7]",
            "serving::the_higher_priority_starts_with_the_next_step_and_the_others_end_alike",
        ),
        "batch": ("batch_generation::prompts_of_every_form_in_their_order",),
        "server": (f"{_STREAMS}[gpt_oss]",),
    },
    "chunk": {
        "generate": (f"{_ATTENTION}[llama4]", f"{_DECODERS}[llama4_text]"),
        "fork": (f"{_DECODERS}[llama4_text]",),
        "pieces": ("attention::a_prompt_may_come_in_pieces[llama4]",),
        "speculation": (f"{_SPECULATION}[llama4]",),
        "step": ("attention::rows_of_unequal_length_need_no_mask[llama4]",),
        "packed": (f"{_UNEVEN}[llama4]",),
        "stock": ("!chunks_by_stock_attention",),
        "in_place": (f"{_ATTENTION}[llama4]", "padded by less than a chunk!padding_that_shifts_chunks"),
        "flashinfer": (
            "flashinfer::a_chunk_begins_its_table_at_its_first_page",
            "for pages that a chunk does not fill!a_chunk_inside_a_page",
        ),
        "compile": ("uneven::one_graph_for_a_total_and_a_batch[llama4]",),
        "multistep": (f"{_REPLAY}[chunk]",),
        "overlap": (f"{_BATCH}[llama4]",),
        "drop": (f"{_BATCH}[llama4]",),
        "offload": (f"{_BATCH}[llama4]",),
        "batch": (f"{_BATCH}[llama4]", "with stock attention!chunks_in_a_loop_by_stock_attention"),
    },
    "latent": {
        "generate": (f"{_WAYS[0]}[deepseek_v3]",),
        "fork": (f"{_WAYS[1]}[deepseek_v3]", f"{_WAYS[2]}[deepseek_v3]"),
        "pieces": ("ways::a_prompt_in_chunks[deepseek_v3]",),
        "crop": (f"{_CROP}[deepseek_v3]",),
        "speculation": (f"{_SPECULATION}[deepseek_v3]",),
        "step": ("attention::rows_of_unequal_length_need_no_mask[deepseek_v3]",),
        "packed": (f"{_UNEVEN}[deepseek_v3]",),
        "stock": (f"{_WAYS[0]}[deepseek_v3]",),
        "in_place": (
            f"{_ATTENTION}[deepseek_v3]",
            "where their projection is hooked!latents_whose_projection_is_hooked",
        ),
        "flashinfer": (
            "flashinfer::latents_are_read_as_keys_and_values",
            "flashinfer::latents_are_answered_with_the_query_that_absorbs_their_projection",
        ),
        "compile": (
            "uneven::one_graph_for_a_total_and_a_batch[deepseek_v3]",
            "fixed::generate_compiles_its_decode_steps_by_itself[deepseek_v3]",
        ),
        "multistep": (f"{_MULTI}[deepseek_v3]",),
        "fp8": (f"{_FP8}[deepseek_v3]",),
        "overlap": (f"{_SERVED}[deepseek_v3]",),
        "drop": (f"{_SERVED}[deepseek_v3]",),
        "offload": (f"{_SERVED}[deepseek_v3]",),
        "batch": (f"{_BATCH}[deepseek_v3]",),
    },
    "compressed": {
        "generate": ("compressed::tokens_are_those_of_the_default_cache",),
        "fork": ("compressed::forks_and_selected_rows_go_their_own_ways",),
        "pieces": ("compressed::a_prompt_in_chunks_and_another_behind_it",),
        "crop": ("!crop_of_compressed_groups",),
        "speculation": ("compressed::candidates_are_tried_and_taken_back",),
        "step": ("compressed::steps_of_a_loop", "over rows of unequal length!compressed_rows_of_unequal_length"),
        "packed": ("!packed_compressed_groups",),
        "stock": ("compressed::tokens_are_those_of_the_default_cache",),
        "in_place": ("!compressed_groups_in_place",),
        "multistep": ("!multistep_over_compressed_groups",),
        "fp8": ("compressed::keys_and_entries_in_fewer_bits_and_what_chooses_them_in_all",),
        "overlap": (f"{_SERVED}[deepseek_v4]",),
        "batch": (f"{_BATCH}[deepseek_v4]",),
    },
    "index": {
        "generate": (f"{_INDEXED}[deepseek_v32]",),
        "fork": ("index::beams_share_pages[deepseek_v32]",),
        "pieces": ("index::a_prompt_in_pieces_and_a_continued_chat[glm_moe_dsa]",),
        "crop": ("index::guessed_tokens_are_cropped_and_rows_selected[axk2]",),
        "speculation": ("index::guessed_tokens_are_cropped_and_rows_selected[axk2]",),
        "step": ("index::sequences_of_a_loop_fork_and_are_cropped[deepseek_v32]",),
        "packed": ("!packed_index_keys",),
        "stock": (f"{_INDEXED}[deepseek_v32]",),
        "in_place": (f"{_INDEXED}[axk2]", "index::keys_that_are_not_chosen_are_not_read[deepseek_v32]"),
        "compile": (
            "index::a_decode_step_is_one_graph",
            "~index::what_cannot_be_one_graph_is_not_compiled[qwen4_exp_text]",
            "with `torch_uma`!compiled_index_keys_in_place",
        ),
        "multistep": ("!multistep_over_index_keys",),
        "overlap": (f"{_BATCH}[axk2]",),
        "drop": (f"{_BATCH}[axk2]",),
        "offload": (f"{_BATCH}[axk2]",),
        "batch": (f"{_BATCH}[axk2]",),
        "compiled": ("!compiled_loop_over_index_keys",),
    },
    "state": {
        "generate": (f"{_WAYS[0]}[qwen3_next]", f"{_WAYS[0]}[mamba2]", f"{_WAYS[0]}[lfm2]"),
        "fork": (f"{_WAYS[1]}[bamba]", f"{_WAYS[2]}[qwen3_next]"),
        "pieces": ("ways::a_prompt_in_chunks[qwen3_next]", "ways::a_prompt_in_chunks[lfm2]"),
        "crop": ("recording::what_was_taken_back_was_never_there[qwen3_next]", "without a recording!crop_of_states"),
        "speculation": (f"{_SPECULATION}[qwen3_next]", f"{_SPECULATION}[lfm2]"),
        "step": (f"{_LOOP}[qwen3_next]", f"{_LOOP}[bamba]"),
        "packed": ("!packed_states",),
        "stock": (f"{_WAYS[0]}[qwen3_next]",),
        "in_place": (f"{_ATTENTION}[qwen3_next]", f"{_ATTENTION}[bamba]", f"{_ATTENTION}[lfm2]"),
        "compile": (
            f"{_IN_PLACE_GRAPH}[qwen3_next]",
            f"{_IN_PLACE_GRAPH}[mamba2]",
            f"{_IN_PLACE_GRAPH}[lfm2]",
            f"{_STOCK_GRAPH}[qwen3_next]",
        ),
        "multistep": (f"{_REPLAY}[hybrid]", "for models!multistep_over_states"),
        "fp8": (f"{_FP8}[qwen3_next]", "precision::a_token_takes_fewer_bytes_and_states_as_many"),
        "overlap": (f"{_SERVED}[qwen3_next]", f"{_SERVED}[mamba2]"),
        "drop": (f"{_SERVED}[qwen3_next]",),
        "offload": (f"{_SERVED}[bamba]",),
        "preempt": (f"{_IN_THE_NEXT_ROUND}[state]",),
        "batch": ("batch_generation::options_seeds_and_priorities_of_each_prompt",),
        "server": (f"{_STREAMS}[qwen3_next]",),
        "compiled": ("serving::states_and_fillers_in_compiled_steps",),
    },
    "restart": {
        "generate": ("restarts::it_is_refused_and_the_cache_goes_on[mamba]", f"{_DECODERS}[jamba]"),
        "fork": (f"{_DECODERS}[jamba]",),
        "pieces": ("!pieces_of_a_prompt_of_mamba",),
        "crop": ("!crop_of_mamba",),
        "speculation": ("!speculation_of_mamba",),
        "step": ("restarts::it_is_refused_and_the_cache_goes_on[mamba]",),
        "packed": ("!packed_mamba",),
        "stock": (f"{_DECODERS}[jamba]",),
        "in_place": (f"{_DECODERS}[jamba]",),
        "multistep": ("!multistep_over_mamba",),
        "overlap": (f"{_SERVED}[jamba]",),
        "drop": (f"{_SERVED}[jamba]",),
        "offload": (f"{_SERVED}[jamba]",),
        "batch": (f"{_BATCH}[mamba]",),
    },
    "loop": {
        "generate": ("own::tokens_are_those_without_a_cache[dory]", "cache::a_looped_model_finds_all_its_layers"),
        "fork": ("own::tokens_are_those_without_a_cache[inkling2_loop_text]",),
        "stock": ("own::tokens_are_those_without_a_cache[dory]",),
        "in_place": (f"{_DECODERS}[dory]",),
        "compile": ("own::decode_steps_are_one_graph[dory]",),
        "pieces": (f"{_BATCH}[dory]",),
        "packed": (f"{_BATCH}[dory]",),
        "overlap": (f"{_BATCH}[dory]",),
        "drop": (f"{_BATCH}[dory]",),
        "offload": (f"{_BATCH}[dory]",),
        "batch": (f"{_BATCH}[dory]",),
    },
    "devices": {
        "generate": (f"{_DEVICES}[llama]", f"{_DEVICES}[qwen3_next]"),
        "fork": (f"{_DEVICES}[beams]", "devices::a_fork_goes_its_own_way_on_both[qwen3_next]"),
        "crop": ("devices::crop_shortens_on_both", "devices::crop_is_refused_on_both_where_one_refuses"),
        "step": ("!a_pool_for_several_devices",),
        "packed": ("!a_pool_for_several_devices",),
        "stock": (f"{_DEVICES}[sdpa]",),
        "in_place": (f"{_DEVICES}[torch_uma]",),
        "compile": ("~devices::what_a_pool_on_each_device_excludes",),
        "multistep": ("!a_pool_for_several_devices",),
        "overlap": ("!a_pool_for_several_devices",),
        "drop": ("!a_pool_for_several_devices",),
        "offload": ("!a_pool_for_several_devices",),
        "preempt": ("!a_pool_for_several_devices",),
        "batch": ("!a_pool_for_several_devices",),
        "server": ("!a_pool_for_several_devices",),
        "compiled": ("!a_pool_for_several_devices",),
    },
}
