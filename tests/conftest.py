"""For all tests: Freight is imported before torch, so that its defaults for threads hold here as
they do for users.

FREIGHT_TEST_DEFAULT_DTYPE=float64 runs them in a process whose default dtype is that (`make
test-defaults`): what Freight computes does not depend on it.

A property is tried on 40 examples, and on 100 where slow tests run too (`make test-all`);
`tests/shares.py` says how a test has another number. The examples differ from run to run.

FREIGHT_TEST_KERNELS=folder runs them with the compiled kernels of that folder (`make sanitize`), on
the pool of csrc/parallel.cpp, which is checked with them; without it they use torch's. With
FREIGHT_TEST_TILES=emulated as well, the AMX build of that folder emulates its tile instructions
(`make test-tiles`), and is run as if the processor and the system had them. FREIGHT_TEST_FEATURES
has instruction sets that the processor counts as having (`tools/test_avx_vnni.sh`).

FREIGHT_CPU_BUILD=avx2 runs them with that build of the kernels, in the processes that tests start
too. A run whose own process loaded another build ends at once; a child process that cannot load it
fails.

FREIGHT_TEST_REMOTE='qemu-aarch64 … driver …/freight_neon.so' runs them with that library, in the
process that the command starts (tests/kernels/test_arm.py).
"""

import atexit
import gc
import logging
import os
import shlex
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:
    # several processes share the cores: a thread that spins would wait for one that is not
    # scheduled
    os.environ["GOMP_SPINCOUNT"] = "0"

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # of a command in the background of a script: children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

import tempfile

os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(
    prefix="freight-tests-"
)  # what is measured once is not the user's

import pytest
import typer.main
from hypothesis import settings

import freight  # noqa: F401

# isort: split
import torch

from freight.lab.bench import timing

# the workers share the cores: threads of one that wait for each other would wait for another worker.
# What threads do is tested where tests set their number, and in the processes that tests start
torch.set_num_threads(
    max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
)

if (
    not torch.cuda.is_available()
):  # read when Triton is imported, which torch and transformers do at their own times
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("freight", deadline=None, max_examples=40)  # a busy machine is no failure
settings.register_profile("all", parent=settings.get_profile("freight"), max_examples=100)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # under nohup: an ignored signal stays ignored in every program that tests start and hang up on,
        # which then never ends; a handler becomes the default there
        signal.signal(signal.SIGHUP, lambda *_: None)
    settings.load_profile("freight" if config.option.markexpr else "all")
    name = os.environ.get("FREIGHT_TEST_DEFAULT_DTYPE")
    if name:
        torch.set_default_dtype(getattr(torch, name))
    folder = os.environ.get("FREIGHT_TEST_KERNELS")
    if folder:
        from freight.kernels.cpu import library
        from freight.settings import cpu_builds

        cpu_builds.FOLDER = Path(folder)
        library._gomp_parallel = lambda: None
        if os.environ.get("FREIGHT_TEST_TILES") == "emulated":
            features = (*cpu_builds.cpu_features(), "amx_tile", "amx_bf16", "amx_int8")
            cpu_builds.cpu_features = lambda: features
            cpu_builds.tile_obstacle = lambda: ""
        more = os.environ.get("FREIGHT_TEST_FEATURES", "").split()
        if more:
            with_more = (*cpu_builds.cpu_features(), *more)
            cpu_builds.cpu_features = lambda: with_more
        assert library.runnable(), f"no build in {folder} runs here"
    build = os.environ.get("FREIGHT_CPU_BUILD")
    if build:
        from freight.kernels.cpu import library

        assert library.load().build == build
    command = shlex.split(os.environ.get("FREIGHT_TEST_REMOTE", ""))
    if command:
        from tests.kernels.arm.remote import remote_library

        from freight.kernels.cpu import library
        from freight.settings import cpu_builds

        build = Path(command[-1]).stem.removeprefix("freight_")
        start = cache(lambda: remote_library(build, command))
        library.runnable = lambda features=None, folder=None: (build,)
        cpu_builds.runnable = library.runnable
        library.load = lambda name=None: start()


@pytest.fixture(scope="session", autouse=True)
def small_memory_probe() -> Iterator[None]:
    """A benchmark that a test runs reads 2 MiB to measure the memory's speed, not four times the
    last-level cache: where that has 480 MiB, each run would take seconds for 2 GB.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "bytes_beyond_caches", lambda: 2**20)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_made_once() -> Iterator[None]:
    """Typer makes the commands of all verbs anew for each command line, and tests run hundreds of
    them in one process.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


# Files whose cases are alike and take long. Of each function, every value runs in some case (1), or
# every pair of values (2). The other cases are `slow`.
STRENGTHS = {
    "tests/kernels/triton/": 1,
    "tests/kernels/test_group_scales.py": 1,
    "tests/kernels/test_reference_states.py": 1,
    "tests/parity/test_stateful.py": 1,
    "tests/e2e/test_experts.py": 1,
    "tests/e2e/test_latent_experts.py": 1,
    "tests/e2e/test_lost_steps.py": 1,
    "tests/e2e/test_state_equivalences.py::test_nor_on_other_kernels": 1,
    "tests/formats/test_hybrids.py": 1,
    "tests/formats/test_mixtures.py": 1,
}

# Functions whose cases compute the same of another model, form or cache, and take long: one in so many
# runs, chosen by its name, so that a model that one function leaves out is of another's share.
SHARES = {
    "tests/e2e/test_chat_terminal.py::test_one_place_decides_about_styles": 2,
    "tests/e2e/test_draft_heads.py::": 3,
    "tests/e2e/test_draft_models.py::test_random_requests": 2,
    "tests/e2e/test_equivalences.py::": 3,
    "tests/e2e/test_experts.py::test_transformers_computes_the_same_from_what_is_written": 3,
    "tests/e2e/test_failing_kernels.py::test_in_": 2,
    "tests/e2e/test_failures.py::test_one_bad_prompt_among_sixteen": 3,
    "tests/e2e/test_fallback.py::test_the_plan_counts_the_bytes_that_are_loaded": 3,
    "tests/e2e/test_fallback_published.py::test_the_old_spelling_describes_the_same_model": 3,
    "tests/e2e/test_families.py::test_a_quantized_model_has_the_names_that_engines_read_and_runs": 3,
    "tests/e2e/test_killed_quantize.py::test_a_signal_while_it_writes_leaves_nothing": 2,
    "tests/e2e/test_latents.py::test_what_a_format_costs": 2,
    "tests/e2e/test_lost_steps.py::": 3,
    "tests/e2e/test_page_layouts.py::": 2,
    "tests/e2e/test_process_defaults.py::test_a_default_of_the_process_changes_no_bit": 2,
    "tests/e2e/test_ranks.py::test_a_store_is_for_any_number_of_ranks": 3,
    "tests/e2e/test_ranks.py::test_two_ranks_have_the_bits_of_one": 3,
    "tests/e2e/test_serve_faults.py::test_a_client_that_leaves_": 2,
    "tests/e2e/test_serve_loading.py::test_every_form_of_a_server_ends_with_a_line_while_it_imports": 2,
    "tests/e2e/test_stages.py::test_no_operation_has_tensors_of_two_devices": 3,
    "tests/e2e/test_stages.py::test_two_stages_have_the_bits_of_one": 2,
    "tests/e2e/test_state_equivalences.py::": 3,
    "tests/e2e/test_store_equivalences.py::": 3,
    "tests/e2e/test_transformers_cache.py::test_every_way_of_generating": 2,
    "tests/formats/test_experts.py::test_logits_are_those_of_the_model_dequantized_by_hand": 2,
    "tests/formats/test_forms.py::test_an_fnuz_device_has_the_same_weights": 3,
    "tests/formats/test_forms.py::test_every_scale_changes_the_output": 3,
    "tests/formats/test_forms.py::test_the_compiled_kernels_compute_the_same": 3,
    "tests/formats/test_four_bits.py::test_it_is_described_and_takes_the_bytes_that_are_counted": 3,
    "tests/formats/test_four_bits.py::test_logits_equal_transformers_over_the_values": 3,
    "tests/formats/test_four_bits.py::test_the_values_are_the_producer_s": 2,
    "tests/formats/test_mixtures.py::": 3,
    "tests/kernels/test_both_ways.py::test_neither_other_sequences_nor_threads": 3,
    "tests/kernels/test_cpu_attention.py::test_sinks": 2,
    "tests/kernels/test_cpu_attention.py::test_values_of_another_width": 2,
    "tests/kernels/test_cpu_shared_products.py::test_a_product_of_ranks_has_the_bits_of_one": 3,
    "tests/kernels/test_emulated_tiles.py::test_products_are_those_of_the_definition": 2,
    "tests/kernels/test_page_layouts.py::test_attention_reads_any_layout": 3,
    "tests/kernels/test_page_layouts.py::test_values_inside_keys_are_those_of_their_own": 3,
    "tests/kernels/triton/test_triton_families.py::test_logits_": 3,
    "tests/kernels/triton/": 2,
    "tests/parity/test_eagle.py::test_states_": 3,
    "tests/parity/test_features.py::": 3,
    "tests/parity/test_predicting.py::": 3,
    "tests/parity/test_stateful.py::": 2,
    "tests/parity/test_transformers.py::test_bfloat16_": 3,
    "tests/unit/calibrate/test_expert_inputs.py::test_one_scale_for_each_side_": 3,
    "tests/unit/calibrate/test_families.py::test_scales_are_those_": 3,
    "tests/unit/checkpoint/test_whole_or_not.py::test_every_call_may_fail": 2,
    "tests/unit/cli/test_hostile_folders.py::test_every_command_ends_soon_and_says_little": 2,
    "tests/unit/compat/test_transformers_cache_copies.py::test_a_copy_generates_the_same_tokens": 3,
    "tests/unit/engine/test_isolation.py::test_any_mixture_": 2,
    "tests/unit/engine/test_recorded_variants.py::test_a_decode_step_is_recorded": 3,
    "tests/unit/engine/test_renewal.py::test_an_update_gives_what": 2,
    "tests/unit/engine/test_scheduler_store.py::test_whatever_happens": 2,
    "tests/unit/evaluate/test_capacity.py::test_every_setting_is_what_the_engine_allocates": 3,
    "tests/unit/evaluate/test_capacity.py::test_states_are_what_the_engine_allocates": 2,
    "tests/unit/models/test_sizes.py::test_every_family_occupies_what_is_counted": 3,
    "tests/unit/parallel/test_shards.py::test_published_models_are_shared_without_a_row_lost": 3,
    "tests/unit/server/page/test_page_looks.py::test_all_of_it_can_be_read": 2,
    "tests/unit/server/test_body.py::test_four_megabytes_take_little_time": 2,
    "tests/unit/server/test_call_forms.py::test_a_call_of_a_megabyte_is_read_in_one_pass": 3,
    "tests/unit/server/test_call_forms.py::test_a_call_that_is_cut_anywhere_is_text": 2,
    "tests/unit/server/test_call_forms.py::test_floods_are_read_in_linear_work": 3,
    "tests/unit/server/test_call_forms.py::test_pieces_change_nothing_and_nothing_raises": 2,
    "tests/unit/server/test_costs.py::test_a_list_over_its_limit_is_refused": 2,
    "tests/unit/server/test_forced_forms.py::test_each_alternative_of_a_value_holds": 3,
    "tests/unit/server/test_forced_forms.py::test_names_of_arguments_": 3,
    "tests/unit/server/test_forced_forms.py::test_what_the_grammar_writes_": 3,
    "tests/unit/server/test_forgotten_tags.py::test_any_closing_tags_": 2,
    "tests/unit/server/test_hostile_templates.py::test_an_answer_ends_soon_with_all_its_text": 2,
    "tests/unit/server/test_json_pieces.py::test_other_threads_run_while_a_body_is_parsed": 3,
    "tests/unit/server/test_tags_in_values.py::test_floods_": 2,
    "tests/unit/test_tokenizer_json.py::test_ids_and_text_are_those_of_the_file_whatever_the_class": 2,
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Spare Python's collector the millions of objects that imports and cases leave, and that stay:
    going through them again and again was half of the time that it took to collect the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        propagate_logs_of_torch()
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)  # of 700 new objects, few are garbage in cycles
        gc.enable()


def propagate_logs_of_torch() -> None:
    """Have pytest find what torch logs at the root logger. It adds its handlers to each logger that
    does not propagate, of which torch has dozens, and takes them away again, six times for a test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


# what modules hold is freed at exit, where Triton's would be reported as leaked, and not before: pytest
# goes through all of it twice when it ends
atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Make no items of the `slow` cases where they are left out: there are more of them than of the
    others. A function keeps one case in any event, without which pytest would call it with none.
    """
    yield
    if "not slow" in metafunc.config.option.markexpr:
        calls = metafunc._calls
        calls[:] = [
            call for call in calls if all(mark.name != "slow" for mark in call.marks)
        ] or calls[:1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from tests.covering import choose, leave_out, share

    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in functions.items():
        strength = setting(STRENGTHS, name)
        count = setting(SHARES, name)
        if not strength and not count:
            continue
        rows = {case.nodeid: tuple(map(repr, case.callspec.params.values())) for case in cases}
        chosen = [*rows]
        if strength:
            chosen = [chosen[place] for place in choose([*rows.values()], strength)]
        if count:
            chosen = share({case: rows[case] for case in sorted(chosen)}, count)
        for case in cases:
            if case.nodeid not in chosen:
                leave_out(case)


def setting(table: dict[str, int], name: str) -> int:
    """Return what the first prefix of a function's name has in the table, 0 where none has."""
    return next((value for prefix, value in table.items() if name.startswith(prefix)), 0)
