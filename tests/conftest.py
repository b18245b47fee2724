"""What every test may use: the `gpu` and `slow` markers, a cache of its own, one thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SLOW = (
    "test_the_command_saves_points_explains_and_says_no",
    "test_prediction_for_this_cpu_equals_a_real_run[graphsage-tiny]",
    "test_the_same_tensors_are_kept_as_by_torch[t5-tiny]",
    "test_an_extended_trace_is_the_full_one[llama-tiny-{'accumulate'",
    "test_an_extended_trace_is_the_full_one[bert-tiny-{'accumulate'",
    "test_an_extended_trace_is_the_full_one[gpt-tiny-{'optimizer'",
    "test_an_extended_trace_is_the_full_one[gpt-tiny-{'precision'",
    "test_compiled_zoo_models_peak_where_an_h200_did[t5-base]",
    "test_bytes_are_those_an_h200_measured[t5-small]",
    "test_ranks_that_share_parameters_move_their_own_activations",
    "test_piip_needs_about_half_the_operations_of_one_branch",
    "test_longer_pixel_sequences_make_recompute_worth_its_time",
    "test_what_cuda_runs_has_rules_too",
    "test_memory_is_as_measured[hummingbird-tiny-teacher]",
    "test_memory_is_as_measured[hummingbird-tiny-reward]",
    "test_video_memory_follows_frames",
    "test_ops_do_not_grow_with_networks_unless_they_run_one_by_one",
    "test_minicpm_v_memory_is_a_straight_line_in_the_slices",
    "test_memory_over_ten_times_the_scene",
    "test_the_published_ladder_rises_in_memory_time_and_energy",
    "test_memory_follows_the_resolution",
    "test_only_four_bits_and_adapters_train_in_four_gigabytes",
    "test_under_a_memory_cap_a_cpu_recomputes_blocks_and_really_needs_less",
    "test_three_stages_of_two_kinds_equal_every_cut",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh2-more2-interleaved-1f1b]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh2-more2-zero-bubble",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh1-more1-zero-bubble]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh2-more2-1f1b]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh1-more1-gpipe]",
    "test_parameters_given_back_between_the_micro_batches_of_a_pipeline[interleaved-1f1b]",
    "test_a_full_disk_keeps_what_was_whole_and_says_so",
    "test_ctrl_c_reaches_the_run_and_it_saves",
    "test_ctrl_c_ends_a_run_whose_states_are_on_disk",
    "test_a_split_model_computes_what_one_process_computes[gpt, four]",
    "test_a_split_model_computes_what_one_process_computes[hf gpt2]",
    "test_a_split_model_computes_what_one_process_computes[hf mixtral]",
    "test_a_dry_run_does_what_a_real_one_does[llama, interleaved-1f1b, 4 stages on 2]",
    "test_shared_positions_cost_what_a_trace_of_them_does[gpt2",
    "test_the_same_tensors_are_kept_as_by_torch[llama-tiny]",
    "test_the_same_tensors_are_kept_as_by_torch[bert-tiny]",
    "test_seconds_and_bytes_follow_the_exact_cost[one-llama3-1b]",
    "test_seconds_and_bytes_follow_the_exact_cost[piped-llama3-1b]",
    "test_plain_gpts_peak_where_an_h200_did[24-2048-16-8-2048",
    "test_compiled_zoo_models_peak_where_an_h200_did[bert-base]",
    "test_compiled_zoo_models_peak_where_an_h200_did[convnext-base]",
    "test_bytes_are_those_an_h200_measured[dit-b2]",
    "test_prediction_for_this_cpu_equals_a_real_run[gpt-tiny]",
    "test_blocks_of_different_residency_need_what_their_own_trace_says[fp32-t5-tiny]",
    "test_blocks_of_different_residency_need_what_their_own_trace_says[fp32-vit-tiny]",
    "test_blocks_of_different_residency_need_what_their_own_trace_says[fsdp-bf16-t5-tiny]",
    "test_blocks_of_different_residency_need_what_their_own_trace_says[bf16-autocast-vit-tiny]",
    "test_a_campaign_outlives_a_process_that_dies",
    "test_the_best_is_the_best_of_everything[positions]",
    "test_not_a_number_stops_saves_and_names_the_block[adamw-foreach-backward]",
    "test_not_a_number_stops_saves_and_names_the_block[adamw-fused-forward]",
    "test_a_damaged_checkpoint_is_found_and_the_one_before_is_used[delete]",
    "test_a_damaged_checkpoint_is_found_and_the_one_before_is_used[cut]",
    "test_every_byte_and_message_of_a_split_model[llama-tiny-mesh4-more4]",
    "test_every_byte_and_message_of_a_split_model[gpt-tiny-mesh3-more3]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh1-more1-zero-bubble-v]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh2-more2-gpipe]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh1-more1-interleaved-1f1b]",
    "test_blocks_of_different_residency_need_what_their_own_trace_says[fsdp-bf16-vit-tiny]",
    "test_step_equals_the_recorded_cuda_step[gpt2-bf16-autocast-2-1.0]",
    "test_step_equals_the_recorded_cuda_step[raftmlp-bf16-autocast]",
    "test_other_models_under_hybrid_sharding[llama-tiny]",
    "test_a_split_model_in_a_pipeline",
    "test_prediction_for_this_cpu_equals_a_real_run[llama-tiny]",
    "test_a_plan_computes_what_one_process_computes[ssm]",
    "test_a_plan_computes_what_one_process_computes[bf16, pipeline, replicas]",
    "test_a_plan_computes_what_one_process_computes[tensor, pipeline]",
    "test_a_plan_computes_what_one_process_computes[tensor, replicas, compiled]",
    "test_a_plan_computes_what_one_process_computes[pipeline, replicas]",
    "test_a_plan_computes_what_one_process_computes[hf, tensor, shards]",
    "test_a_plan_computes_what_one_process_computes[tensor]",
    "test_a_run_with_masters_goes_on_where_it_stopped[int8",
    "test_a_run_with_masters_goes_on_where_it_stopped[split",
    "test_autocast[llama-tiny]",
    "test_autocast[gpt-tiny]",
    "test_a_module_is_traced_predicted_planned_and_run_as_planned[tnt-tiny",
    "test_a_plan_for_such_a_model_is_one_that_runs[H200]",
    "test_stages_compute_what_one_process_computes[llama, 1f1b, 2 stages on 2, tp 2]",
    "test_a_dry_run_does_what_a_real_one_does[t5, zero-bubble",
    "test_every_byte_and_message_of_a_split_model[llama-tiny-mesh1",
    "test_every_byte_and_message_of_shared_positions[llama-tiny-mesh1",
    "test_memory_is_that_of_a_real_step_and_every_op_has_a_rule[mamba_yolo-tiny-]",
    "test_peak_of_a_cpu_step_is_exact_to_the_byte[bf16]",
    "test_an_extended_trace_is_the_full_one[vit-tiny-{'accumulate'",
    "test_every_op_has_a_rule[hummingbird-tiny-teacher]",
    "test_ten_steps_are_five_and_five_bit_for_bit_on_two_ranks[tensor]",
    "test_every_byte_and_message_of_data_parallelism[mesh8",
    "test_every_byte_and_message_of_data_parallelism[mesh9",
    "test_a_plan_computes_what_one_process_computes[hf, pipeline, shards]",
    "test_a_plan_computes_what_one_process_computes[pipeline, compiled, shards]",
    "test_a_plan_computes_what_one_process_computes[unet]",
    "test_a_plan_computes_what_one_process_computes[tensor, shards]",
    "test_stages_compute_what_one_process_computes[t5, 1f1b, 4 stages on 4]",
    "test_stages_compute_what_one_process_computes[gpt, 1f1b, 4 stages on 4]",
    "test_stages_compute_what_one_process_computes[hf, zero-bubble, 4 stages on 2]",
    "test_stages_compute_what_one_process_computes[gpt, zero-bubble-v, 4 stages on 2]",
    "test_step_equals_the_recorded_cuda_step[tnt-bf16-autocast]",
    "test_step_equals_the_recorded_cuda_step[dit-bf16-autocast]",
    "test_step_equals_the_recorded_cuda_step[convnext-bf16-autocast]",
    "test_a_split_model_computes_what_one_process_computes[gpt, compiled]",
    "test_a_split_model_computes_what_one_process_computes[vit]",
    "test_a_module_is_traced_predicted_planned_and_run_as_planned[mf-tiny",
    "test_a_module_is_traced_predicted_planned_and_run_as_planned[perforated-tiny",
    "test_a_real_check_of_a_small_model",
    "test_what_user_code_does_is_told_in_one_line[nn.Linear(4, 4).cuda()",
    "test_what_user_code_does_is_told_in_one_line[os._exit(3)",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh0-more0-zero-bubble-v]",
    "test_every_byte_and_message_of_every_rank_of_a_pipeline[mesh0-more0-gpipe]",
    "test_an_extended_trace_is_the_full_one[gpt-tiny-{'accumulate'",
    "test_four_steps_are_two_and_two_whatever_is_kept_of_them[momentum]",
    "test_four_steps_are_two_and_two_whatever_is_kept_of_them[sgd]",
    "test_memory_is_predicted_and_no_op_is_without_a_rule[piip-tiny-]",
)
"""Long cases whose like the quick suite has: another mesh, model or command. `make test-slow` runs them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long cases; skip tests marked `gpu` where there is no CUDA device; torch is imported only if there are any."""
    for item in items:
        if item.name.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that belongs to this test alone, named by FORETELL_CACHE."""
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setenv("FORETELL_CACHE", str(path))
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors only lose time to a second thread, most of all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
