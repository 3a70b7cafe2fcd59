"""Handles a URL as --output-prefix: writes to a local folder, where a run can be resumed, and uploads at the end."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path

from megatron.data import remote
from megatron.data.indexed.record import record_path
from megatron.data.remote_pairs import beside, put_pair, refuse_existing_urls
from megatron.errors import StorageError
from megatron.preprocess.merge import Report
from megatron.preprocess.options import PreprocessSettings
from megatron.preprocess.run import is_of, preprocess

Say = Callable[[str], None]


def default_folder(url: str) -> Path:
    """Returns a folder in the working directory that depends only on the URL, so that --resume finds it."""
    return Path(f"{url.rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}.upload")


def preprocess_to_url(settings: PreprocessSettings, folder: Path | None, say: Say) -> Report:
    url = settings.output_prefix
    remote.refuse_secrets(url)
    folder = folder or default_folder(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"--work-folder {folder}: cannot be created ({error.strerror}); give another folder"
        ) from None
    local = dataclasses.replace(settings, output_prefix=str(folder / url.rpartition("/")[2]))
    outputs = {output: beside(url, output) for output in local.outputs}
    if not settings.overwrite and not settings.resume:
        refuse_existing_urls(url, list(outputs.values()))
    parameters = f"{url}.sentences.json"
    _fetch_parameters(local, parameters)

    def uploaded(digest: str) -> bool:
        if all(_is_there(output, place, digest) for output, place in outputs.items()):
            return True
        refuse_existing_urls(url, list(outputs.values()))
        return False

    report = preprocess(local, say, uploaded)
    if local.parameters_file.exists() and (settings.overwrite or not remote.exists(parameters)):
        remote.upload(local.parameters_file, parameters)
    for output, place in outputs.items():
        if record_path(output).exists():
            say(f"uploading {place}")
            put_pair(output, place)
    for key in report.keys:
        key.prefix = outputs[key.prefix]
    local.parameters_file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty: other partitions or the user have files there
        folder.rmdir()
    return report


def _fetch_parameters(local: PreprocessSettings, url: str) -> None:
    """Downloads the sentence parameters that another partition learned."""
    anew = local.overwrite and local.world == 1
    if local.split_sentences and not anew and not local.parameters_file.exists() and remote.exists(url):
        remote.download(url, local.parameters_file)


def _is_there(output: str, url: str, digest: str) -> bool:
    if not remote.exists(f"{url}.meta.json"):
        return False
    path = record_path(output)
    remote.download(f"{url}.meta.json", path)
    try:
        return is_of(output, digest)
    finally:
        path.unlink()
