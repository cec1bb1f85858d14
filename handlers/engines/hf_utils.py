"""Fetching models from Hugging Face's hub."""

from marserve.handlers.engines.optional import need

_FILES = ["*.json", "*.pt", "*.bin", "*.txt", "*.model", "*.pth", "*.safetensors", "original/*"]


def download_model(
    model_id: str = "meta-llama/Meta-Llama-3.1-8B-Instruct",
    revision: str = "main",
    model_path: str = ".cache",
    use_auth_token: bool | str = True,
) -> str:
    """Download a model's weights and tokenizer; what is there already is not fetched again.

    Args:
        model_id: Owner and name on the hub.
        revision: Branch, tag or commit.
        model_path: Directory for the downloads of all models.
        use_auth_token: A token; True takes the one that ``huggingface-cli login`` saved.

    Returns:
        Directory of this model and revision.

    Raises:
        ImportError: huggingface_hub is not installed.
    """
    hub = need("huggingface_hub", "huggingface_hub", "download_model")
    return str(
        hub.snapshot_download(
            repo_id=model_id,
            revision=revision,
            allow_patterns=_FILES,
            cache_dir=model_path,
            token=use_auth_token,
        )
    )
