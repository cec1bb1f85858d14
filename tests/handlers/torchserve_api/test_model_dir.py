from ts.torch_handler.unit_tests.test_utils.model_dir import copy_files, download_model


def test_a_file_is_fetched_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "weights.pth"
    source.write_text("weights")
    (tmp_path / "model").mkdir()
    download_model(source.as_uri(), tmp_path / "model")
    source.unlink()
    download_model(source.as_uri(), tmp_path / "model")
    assert (tmp_path / "model" / "model.pt").read_text() == "weights"


def test_files_are_copied_under_other_names(tmp_path) -> None:
    (tmp_path / "a").write_text("content")
    (tmp_path / "there").mkdir()
    copy_files(tmp_path, tmp_path / "there", {"a": "b"})
    assert (tmp_path / "there" / "b").read_text() == "content"
