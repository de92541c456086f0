"""Mistakes in stores, in the rows of a corpus and in checkpoints."""

from __future__ import annotations

from mutant_tables.mutant import Mutant

STORAGE = (
    Mutant(
        name="store: a listing shows files that are still being written",
        file="electra_dist/store/local_store.py",
        original="for name in names if not is_temporary(name)]\n        return",
        mutated="for name in names]\n        return",
        test="tests/store/test_store.py::test_unfinished_writes_selected_by_doomed_are_discarded",
    ),
    Mutant(
        name="store: of eight writers of a new object several are told that they won",
        file="electra_dist/store/local_store.py",
        original="with replacing(path, only_new=True) as out:",
        mutated="with replacing(path, only_new=False) as out:",
        test="tests/store/test_store.py::"
        "test_exactly_one_of_eight_concurrent_write_new_calls_wins_and_its_bytes_are_stored",
    ),
    Mutant(
        name="store: a range of an object is read from its beginning",
        file="electra_dist/store/local_store.py",
        original="            stream.seek(start)\n",
        mutated="",
        test="tests/store/test_store.py::test_a_range_is_that_part_of_the_object_and_ends_at_its_end",
    ),
    Mutant(
        name="store: a read-only disk counts as a mistake of the user",
        file="electra_dist/store/failure_kinds.py",
        original='away("read-only file system"',
        mutated='_user("read-only file system"',
        test="tests/store/test_failure_kinds.py::test_errors_have_the_kind_that_decides_what_follows",
    ),
    Mutant(
        name="store: a folder that does not respond looks empty",
        file="electra_dist/store/local_store.py",
        original="if isinstance(error, (FileNotFoundError, NotADirectoryError)):",
        mutated="if isinstance(error, OSError):",
        test="tests/store/test_failure_kinds.py::test_a_folder_that_does_not_respond_is_not_taken_for_an_empty_one",
    ),
    Mutant(
        name="store: after a long outage the last error is reported, not the first",
        file="electra_dist/store/patience.py",
        original='f"{self._first}; storage was waited',
        mutated='f"{error}; storage was waited',
        test="tests/store/test_patience.py::test_the_first_error_is_the_one_of_the_end",
    ),
    Mutant(
        name="store: an error that no wait cures is waited for",
        file="electra_dist/store/patience.py",
        original="if is_end_of_inner_wait or not is_worth_waiting_for(error):\n            raise error\n",
        mutated="if is_end_of_inner_wait:\n            raise error\n",
        test="tests/store/test_patience.py::test_what_no_wait_cures_is_raised_at_once",
    ),
    Mutant(
        name="store: a part of an upload is read at the place of the next one",
        file="electra_dist/store/s3/s3_store.py",
        original="read((number - 1) * part_size, part_size)",
        mutated="read(number * part_size, part_size)",
        test="tests/store/test_s3_faults.py::test_multipart_upload_survives_faults",
    ),
    Mutant(
        name="store: the traceback of an error quotes the secret key",
        file="electra_dist/store/s3/requests.py",
        original="            raise failure from None  # The text",
        mutated="            raise failure  # The text",
        test="tests/store/test_s3_faults.py::"
        "test_final_answers_are_explained_without_retry_and_without_the_services_text",
    ),
    Mutant(
        name="store: JSON that is no object is accepted",
        file="electra_dist/store/json_file.py",
        original="if not isinstance(tree, dict):\n        raise DamagedJson",
        mutated="if tree is None:\n        raise DamagedJson",
        test="tests/store/test_json_file.py::test_a_value_that_is_not_an_object_is_damage",
    ),
    Mutant(
        name="store: a file gets its name before its bytes are on the disk",
        file="electra_dist/store/atomic_files.py",
        original="                os.fsync(out.fileno())\n",
        mutated="",
        test="tests/store/test_durable_order.py::"
        "test_all_bytes_are_synced_before_a_file_gets_its_name_and_the_folder_after_it",
    ),
    Mutant(
        name="store: a file is synced before all its bytes are written",
        file="electra_dist/store/atomic_files.py",
        original="                out.flush()\n",
        mutated="",
        test="tests/store/test_durable_order.py::"
        "test_all_bytes_are_synced_before_a_file_gets_its_name_and_the_folder_after_it",
    ),
    Mutant(
        name="store: the folder of a new file is not synced to the disk",
        file="electra_dist/store/atomic_files.py",
        original="            sync_folder(path.parent)\n        finally:",
        mutated="        finally:",
        test="tests/store/test_durable_order.py::"
        "test_all_bytes_are_synced_before_a_file_gets_its_name_and_the_folder_after_it",
    ),
    Mutant(
        name="store: folders are never synced to the disk",
        file="electra_dist/store/atomic_files.py",
        original="        os.fsync(descriptor)\n    finally",
        mutated="        pass\n    finally",
        test="tests/store/test_durable_order.py::"
        "test_all_bytes_are_synced_before_a_file_gets_its_name_and_the_folder_after_it",
    ),
    Mutant(
        name="store: the name of a new folder is not synced to the disk",
        file="electra_dist/store/atomic_files.py",
        original="    for path in missing_folders:\n        sync_folder(path.parent)\n",
        mutated="",
        test="tests/store/test_durable_order.py::"
        "test_the_parent_of_every_new_folder_is_synced_so_that_its_name_survives_a_power_failure",
    ),
    Mutant(
        name="store: an error quotes any text of a service as its code",
        file="electra_dist/store/failure_kinds.py",
        original='return text if re.fullmatch(r"[A-Za-z0-9.]{1,40}", text) else _UNKNOWN_CODE',
        mutated="return text or _UNKNOWN_CODE",
        test="tests/store/test_failure_kinds.py::test_an_error_code_that_could_hold_a_secret_is_not_quoted",
    ),
    Mutant(
        name="data: rows are shuffled with the random numbers of the shards",
        file="electra_dist/data/order.py",
        original="window_sizes,\n            seed=self._seed,\n            purpose=Purpose.ROW_ORDER,",
        mutated="window_sizes,\n            seed=self._seed,\n            purpose=Purpose.SHARD_ORDER,",
        test="tests/data/test_order.py::test_the_order_of_existing_runs_never_changes",
    ),
    Mutant(
        name="data: every epoch has the order of the first one",
        file="electra_dist/data/order.py",
        original="epoch=np.full(num_shards, epoch, np.int64),",
        mutated="epoch=np.zeros(num_shards, np.int64),",
        test="tests/data/test_order.py::test_the_order_of_existing_runs_never_changes",
    ),
    Mutant(
        name="data: every rank reads the rows of rank 0",
        file="electra_dist/data/loader.py",
        original="self._row0 = rank * self._num_rows",
        mutated="self._row0 = 0",
        test="tests/data/test_loader.py::test_every_world_size_reads_the_rows_of_the_order",
    ),
    Mutant(
        name="data: the wait for rows is not counted",
        file="electra_dist/data/loader.py",
        original="self.wait_s += time.monotonic() - start",
        mutated="self.wait_s += 0.0",
        test="tests/data/test_loader.py::test_waiting_for_rows_is_counted_in_seconds",
    ),
    Mutant(
        name="data: a fetched shard is not verified",
        file="electra_dist/data/node_cache.py",
        original="if file_sha256(unverified) == entry.sha256:",
        mutated="if unverified.exists():",
        test="tests/data/test_shard_cache.py::test_a_shard_that_is_wrong_at_every_fetch_is_named",
    ),
    Mutant(
        name="data: the room that running downloads have reserved counts as free",
        file="electra_dist/data/node_cache.py",
        original="lacking[digest] += reserved_bytes",
        mutated="lacking[digest] += 0",
        test="tests/data/test_shard_cache.py::test_a_download_reserves_its_room_on_a_nearly_full_disk",
    ),
    Mutant(
        name="data: the shards to keep are evicted first",
        file="electra_dist/data/node_cache.py",
        original=", path.stem), reverse=True)",
        mutated=", path.stem))",
        test="tests/data/test_eviction_order.py::test_the_order_is_a_function_of_the_shards_alone",
    ),
    Mutant(
        name="data: the room of one window is counted instead of two",
        file="electra_dist/data/cache_folder.py",
        original="[: 2 * window_shards]",
        mutated="[:window_shards]",
        test="tests/data/test_cache_folder.py::test_the_share_that_is_fetched_again",
    ),
    Mutant(
        name="data: a link to a folder of somebody else is taken for the cache",
        file="electra_dist/store/atomic_files.py",
        original="status = folder.lstat()",
        mutated="status = folder.stat()",
        test="tests/data/test_cache_folder.py::test_a_folder_of_somebody_else_is_refused",
    ),
    Mutant(
        name="data: a shard may be listed twice",
        file="electra_dist/data/manifest.py",
        original="if count > 1]",
        mutated="if count > 2]",
        test="tests/data/test_manifest.py::test_bad_shard_or_tokenizer_entries_are_refused",
    ),
    Mutant(
        name="data: rows of local shards are not verified when they are copied",
        file="electra_dist/data/shard.py",
        original="self.sha256, self._checksums = self._digest_and_checksums(stream)",
        mutated="self.sha256, _ = self._digest_and_checksums(stream)",
        test="tests/data/test_changed_rows.py::test_a_local_shard_that_changes_during_a_run_ends_it_with_shard_and_block",
    ),
    Mutant(
        name="data: receipts ignore how often a row occurs",
        file="electra_dist/data/receipt.py",
        original="row_hash(row_ids).sum(dtype=np.uint64)",
        mutated="row_hash(np.unique(row_ids)).sum(dtype=np.uint64)",
        test="tests/data/test_receipt.py::test_any_order_and_any_split_of_rows_gives_the_same_receipt",
    ),
    Mutant(
        name="data: a use of a row after the end of its phase is listed",
        file="electra_dist/data/order.py",
        original="if position < end_position:",
        mutated="if position <= end_position:",
        test="tests/data/test_phased_order.py::test_the_uses_of_a_row_are_the_positions_that_have_it",
    ),
    Mutant(
        name="data: a token id outside the vocabulary is accepted",
        file="electra_dist/data/loader.py",
        original="if ids.max() < vocab_size:",
        mutated="if ids.min() < vocab_size:",
        test="tests/data/test_loader.py::test_a_token_id_outside_the_vocabulary_ends_the_run_with_shard_and_row",
    ),
    Mutant(
        name="data: the token id after the last one of the vocabulary is accepted",
        file="electra_dist/data/loader.py",
        original="if ids.max() < vocab_size:",
        mutated="if ids.max() <= vocab_size:",
        test="tests/data/test_loader.py::test_a_token_id_outside_the_vocabulary_ends_the_run_with_shard_and_row",
    ),
    Mutant(
        name="data: the cache folder of another user is taken",
        file="electra_dist/store/atomic_files.py",
        original="and status.st_uid == os.getuid() and",
        mutated="and",
        test="tests/data/test_cache_folder.py::"
        "test_a_folder_that_another_user_has_created_under_the_name_of_ones_own_is_refused",
    ),
    Mutant(
        name="data: the first row of a shard is named after the shard before",
        file="electra_dist/data/manifest.py",
        original='row_id, side="right"',
        mutated='row_id, side="left"',
        test="tests/data/test_manifest.py::"
        "test_the_rows_at_the_borders_of_every_shard_are_named_after_their_own_shard",
    ),
    Mutant(
        name="checkpoint: a replaced start of the run commits all the same",
        file="electra_dist/checkpoint/commit.py",
        original="    check_fence(target, state.attempt)\n",
        mutated="",
        test="tests/checkpoint/test_commit.py::test_replaced_attempt_cannot_commit_and_deletes_nothing",
    ),
    Mutant(
        name="checkpoint: old files are deleted before the manifest that lists them",
        file="electra_dist/checkpoint/commit.py",
        original="        target.delete(checkpoint.key(MANIFEST))\n"
        '        target.delete_all([key for key in target.list(f"{checkpoint.folder}/") if is_of_checkpoint(key)])',
        mutated='        target.delete_all(target.list(f"{checkpoint.folder}/rank"))\n'
        "        target.delete(checkpoint.key(MANIFEST))",
        test="tests/checkpoint/test_commit.py::test_retention_deletes_the_manifest_first",
    ),
    Mutant(
        name="checkpoint: a service that replaces files is not noticed",
        file="electra_dist/checkpoint/commit.py",
        original="    in_parallel(lambda target: check_exclusive(target, _attempt_key(attempt), document), targets)\n",
        mutated="",
        test="tests/checkpoint/test_commit.py::test_a_service_that_replaces_files_instead_of_refusing_is_refused",
    ),
    Mutant(
        name="checkpoint: a start deletes files of living starts",
        file="electra_dist/checkpoint/commit.py",
        original="return folder_attempt < attempt",
        mutated="return folder_attempt <= attempt",
        test="tests/checkpoint/test_commit.py::test_start_removes_unfinished_files_of_dead_attempts_and_nothing_else",
    ),
    Mutant(
        name="checkpoint: the worst held-out score counts as the best",
        file="electra_dist/checkpoint/commit.py",
        original="(0, -score.context_auc, *newest_first)",
        mutated="(0, score.context_auc, *newest_first)",
        test="tests/checkpoint/test_commit.py::test_best_is_the_context_auc_or_else_the_own_loss",
    ),
    Mutant(
        name="checkpoint: no checkpoint is old enough for a rollback",
        file="electra_dist/checkpoint/commit.py",
        original="checkpoint.step <= ordered[-1].step - rollback_steps",
        mutated="checkpoint.step <= ordered[-1].step",
        test="tests/checkpoint/test_retention.py::test_retention_keeps_exactly_the_checkpoints_that_the_policy_names",
    ),
    Mutant(
        name="checkpoint: the pieces of a large tensor all begin at element 0",
        file="electra_dist/checkpoint/tensor_file.py",
        original="start=self.start + begin,",
        mutated="start=self.start,",
        test="tests/checkpoint/test_tensor_file.py::test_large_tensor_is_divided_into_pieces_with_their_own_entries",
    ),
    Mutant(
        name="checkpoint: a manifest with a changed byte is accepted",
        file="electra_dist/checkpoint/manifest.py",
        original="if recorded_digest != _sha256(tree):",
        mutated="if recorded_digest is None:",
        test="tests/checkpoint/test_checkpoint_manifest.py::test_every_changed_byte_of_a_manifest_is_detected",
    ),
    Mutant(
        name="checkpoint: a file with bytes that no tensor covers is accepted",
        file="electra_dist/checkpoint/manifest.py",
        original="            if file.size_bytes != size_bytes:\n",
        mutated="            if file.size_bytes < size_bytes:\n",
        test="tests/checkpoint/test_checkpoint_manifest.py::test_manifest_whose_tensors_do_not_cover_a_file_is_refused",
    ),
    Mutant(
        name="checkpoint: the bytes of a tensor are not compared with their digest",
        file="electra_dist/checkpoint/reader.py",
        original="if len(part) == tensor.size_bytes and found_sha256 == tensor.sha256:",
        mutated="if len(part) == tensor.size_bytes:",
        test="tests/checkpoint/test_restore.py::"
        "test_newest_good_checkpoint_is_loaded_and_a_damaged_newer_one_is_set_aside",
    ),
    Mutant(
        name="checkpoint: a part of a tensor is copied to the wrong place",
        file="electra_dist/checkpoint/reader.py",
        original="values[begin - tensor.start : end - tensor.start]",
        mutated="values[: end - begin]",
        test="tests/checkpoint/test_reader.py::test_checkpoint_of_any_world_size_loads_at_any_other_bit_for_bit",
    ),
    Mutant(
        name="checkpoint: newly skipped steps make older checkpoints useless",
        file="electra_dist/checkpoint/restore.py",
        original="for step in expected.skipped if step < found.step)",
        mutated="for step in expected.skipped)",
        test="tests/checkpoint/test_restore.py::test_checkpoint_before_newly_skipped_steps_is_loaded",
    ),
    Mutant(
        name="checkpoint: a save stores the values of a later step",
        file="electra_dist/checkpoint/writer.py",
        original="host.copy_(fragment.views[kind], non_blocking=True)",
        mutated="host = fragment.views[kind]",
        test="tests/checkpoint/test_writer.py::"
        "test_save_stores_the_values_at_the_time_of_the_call_and_reuses_the_reserved_buffer",
    ),
    Mutant(
        name="checkpoint: the space for a checkpoint is compared for one rank only",
        file="electra_dist/checkpoint/writer.py",
        original="self._buffer.element_size() * num_ranks)",
        mutated="self._buffer.element_size())",
        test="tests/checkpoint/test_writer.py::test_the_space_for_the_next_checkpoint_is_compared_with_the_free_space",
    ),
    Mutant(
        name="checkpoint: an older step is loaded while the newest one cannot be read",
        file="electra_dist/checkpoint/checkpoint.py",
        original="            raise reason  # an older checkpoint",
        mutated="            break  # an older checkpoint",
        test="tests/checkpoint/test_restore.py::"
        "test_no_older_step_of_another_target_is_loaded_while_the_newest_one_cannot_be_read",
    ),
    Mutant(
        name="checkpoint: a hole in the middle of a parameter is accepted",
        file="electra_dist/checkpoint/manifest.py",
        original="if start != covered or end <= start",
        mutated="if start < covered or end <= start",
        test="tests/checkpoint/test_checkpoint_manifest.py::"
        "test_manifest_with_a_hole_or_an_overlap_in_a_parameter_is_refused",
    ),
    Mutant(
        name="checkpoint: elements of a parameter may be stored twice",
        file="electra_dist/checkpoint/manifest.py",
        original="if start != covered or end <= start",
        mutated="if start > covered or end <= start",
        test="tests/checkpoint/test_checkpoint_manifest.py::"
        "test_manifest_with_a_hole_or_an_overlap_in_a_parameter_is_refused",
    ),
    Mutant(
        name="checkpoint: a tensor file has its name before it is whole",
        file="electra_dist/store/local_store.py",
        original="        with replacing(path) as out:\n",
        mutated='        with path.open("wb") as out:\n',
        test="tests/checkpoint/test_tensor_file.py::"
        "test_a_file_gets_its_name_when_it_is_whole_and_synced_and_then_its_folder_is_synced",
    ),
    Mutant(
        name="checkpoint: a file counts before a listing shows its whole size",
        file="electra_dist/checkpoint/commit.py",
        original="if file is not None and file.size_bytes == size_bytes:",
        mutated="if file is not None:",
        test="tests/checkpoint/test_many_ranks.py::test_a_file_counts_when_a_listing_shows_its_whole_size",
    ),
)
