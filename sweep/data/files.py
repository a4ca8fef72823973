"""Find the files of a data folder, and give each a role by the words of its name.

A file is for training, for validation, to be split, or left out with a reason. A folder whose
names do not tell which is refused. Files of formats whose bytes are not their text are not read.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sweep.errors import SweepError, cut, list_some

TRAIN = "train"
VALID = "valid"
TEST = "test"
TEXT_ROLE = "text"  # files without a role of their own; their documents are split

ROLE_WORDS = {
    TRAIN: r"train|trn|trainset|traindata",
    VALID: (
        r"valid|validation|validate|validating|val|vld|dev"
        r"|validset|valset|devset|validdata|valdata"
    ),
    TEST: r"test|tst|eval|unseen|testset|evalset|testdata|evaldata|hold ?out|held ?out",
}
# These count only in names without other words: training.txt has a role, training-plan.md has none.
WEAK_WORDS = {
    TRAIN: r"training",
    VALID: r"development",
    TEST: r"tests|testing|evaluation|evaluations",
}
NEUTRAL_WORDS = {"of", "part", "shard", "split", "set", "data", "dataset", "file", "text"}
# Endings that make another word of a role word, such as trainer.
ENDINGS = {"s", "ed", "er", "ers", "ing", "ings"}
LEAST_LETTERS = 5  # a longer role word counts whatever it is written together with
ENGLISH = re.compile(r"(dis|eye|re|con|over|qua|pre)?s?train|(in|re)valid(at(e|ing|ion))?")

ABOUT_DATA = {"readme", "license", "licence", "notice"}  # first words of names
ABOUT_NAMES = re.compile(  # whole names without suffixes
    r"(md5|b2|sha\d*)[-_]?sums?|checksums?|requirements([-_](dev|docs|tests?))?"
    r"|citation|changelog|authors|contributing|copying|metadata"
)

SHARD = re.compile(r"(\d+)[-_.]of[-_.](\d+)", re.IGNORECASE)
TABLE_FORMATS = {
    ".json": "json",
    ".jsonl": "json",
    ".jsonlines": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
}
# Other files are read as plain text too, and that is said.
TEXT_SUFFIXES = {"", ".txt", ".text", ".md", ".markdown", ".rst", ".tokens", ".raw"}
BACKUP = "a backup or an unfinished file"
OTHER_FORMATS = {
    "markup": (".html", ".htm", ".xhtml", ".mhtml", ".xml", ".svg", ".rss", ".rtf"),
    "a notebook": (".ipynb",),
    "an office document": (
        *(".pdf", ".ps", ".doc", ".docx", ".odt", ".ppt", ".pptx", ".odp", ".epub", ".mobi"),
        *(".xls", ".xlsx", ".ods", ".pages", ".numbers"),
    ),
    "a binary table": (
        *(".arrow", ".feather", ".orc", ".avro", ".pq", ".db", ".sqlite", ".sqlite3"),
        *(".h5", ".hdf5", ".msgpack", ".tfrecord", ".mdb"),
    ),
    "a file of numbers": (
        *(".npy", ".npz", ".bin", ".idx", ".pt", ".pth", ".pkl", ".pickle", ".safetensors"),
    ),
    "an archive": (
        *(".zip", ".tar", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".7z", ".rar", ".lzma"),
    ),
    "a picture, sound or film": (
        *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ico"),
        *(".mp3", ".wav", ".flac", ".ogg", ".mp4", ".mkv", ".webm", ".mov"),
    ),
    "a checksum or a signature": (".md5", ".sha1", ".sha256", ".sha512", ".sig"),
    BACKUP: (
        *(".bak", ".orig", ".tmp", ".part", ".partial", ".crdownload", ".incomplete"),
        *(".swp", ".lock"),
    ),
}
OTHER_SUFFIXES = {suffix: what for what, suffixes in OTHER_FORMATS.items() for suffix in suffixes}
EXTRACT = "Extract its text into a .txt file, or into a .jsonl file with a document per line."


@dataclass(frozen=True)
class DataFiles:
    """The files of a source by role (train and valid, or text), and what is not read."""

    roles: dict[str, list[Path]]
    left_out: dict[str, str] = field(default_factory=dict)  # reasons by name
    notes: tuple[str, ...] = ()  # sentences about a single file


def name_list(names: Sequence[str], most: int = 4, characters: int = 45) -> str:
    """Return the first names of a list, each shortened, and how many more there are."""
    return list_some([cut(name, characters) for name in names], most)


def format_of(path: Path) -> str:
    """Return the format that a file is read as: text, or that of a table."""
    return TABLE_FORMATS.get(_suffix(path.name), "text")


def has_text_suffix(name: str) -> bool:
    suffix = _suffix(name)
    return suffix in TEXT_SUFFIXES or bool(_roles_in([suffix[1:]], ROLE_WORDS))


def _suffix(name: str) -> str:
    """Return the last suffix before `.gz`, in lower case."""
    return Path(name.lower().removesuffix(".gz")).suffix


def other_format(name: str) -> str | None:
    """Return what a file is by its name if its bytes are not its text, else None."""
    return BACKUP if name.endswith("~") else OTHER_SUFFIXES.get(_suffix(name))


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case; a suffix counts only if it names a role."""
    stem = name[: -len(".gz")] if name.lower().endswith(".gz") else name
    suffix = Path(stem).suffix
    if not _roles_in([suffix[1:].lower()], ROLE_WORDS):
        stem = stem.removesuffix(suffix)
    divided = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", stem)  # trainData
    return re.findall(r"[^\W\d_]+", divided.lower())


def role_of(name: str) -> str | None:
    """Return the role that the words of a name give it; refuse the words of two roles."""
    words = words_of(name)
    roles = _roles_in(words, ROLE_WORDS)
    if not roles and len(set(words) - NEUTRAL_WORDS) == 1:
        roles = _roles_in(words, WEAK_WORDS)
    if len(roles) > 1:
        expected = f"must not hold the words of {' and '.join(roles)} at once"
        raise SweepError(f"the name of a data file {expected}, got {cut(name, 60)}. Rename it.")
    return roles[0] if roles else None


def _roles_in(words: Sequence[str], role_words: dict[str, str]) -> list[str]:
    text = " ".join(words)
    return [role for role, pattern in role_words.items() if re.search(rf"\b({pattern})\b", text)]


def _without_a_role(name: str) -> list[tuple[str, str]]:
    """Return what a name would be without each of its role words, which may begin or end a word."""
    words = words_of(name)
    names = []
    for index, word in enumerate(words):
        before = "".join(words[:index])
        after = "".join(words[index + 1 :])
        for role in ROLE_WORDS:
            rests = _rests(word, f"{ROLE_WORDS[role]}|{WEAK_WORDS[role]}")
            names += [(role, before + rest + after) for rest in rests]
    return names


def _rests(word: str, pattern: str) -> list[str]:
    """Return what a word would be without each role word that is the whole, its end or its start.

    An ending such as that of `trainer` is a part of the word.
    """
    rests = []
    for role_word in pattern.replace(" ?", "").split("|"):
        if word.endswith(role_word):
            rests.append(word.removesuffix(role_word))
        elif word.startswith(role_word) and word.removeprefix(role_word) not in ENDINGS:
            rests.append(word.removeprefix(role_word))
    return rests


def _ends_with_a_role(name: str) -> str | None:
    """Return the role of the long role word that ends a word of a name, as in storiesvalid."""
    for role, pattern in ROLE_WORDS.items():
        long = "|".join(word for word in pattern.split("|") if len(word) >= LEAST_LETTERS)
        for word in words_of(name):
            if re.fullmatch(f".+({long})", word) and not ENGLISH.fullmatch(word):
                return role
    return None


def _names_only_a_role(name: str) -> bool:
    """Return True for names such as train.txt, train_data.txt and train-00000-of-00003.jsonl."""
    words = " ".join(word for word in words_of(name) if word not in NEUTRAL_WORDS)
    patterns = [*ROLE_WORDS.values(), *WEAK_WORDS.values()]
    return any(re.fullmatch(pattern, words) for pattern in patterns)


def locate_files(source: str) -> DataFiles:
    """Return the files of a path by role, by their names alone; refuse what is ambiguous."""
    path = Path(source).expanduser().absolute()
    try:
        is_folder = path.is_dir()
        exists = is_folder or path.is_file()
    except OSError:  # a name that is too long
        exists = False
    if not source or not exists:
        choices = "tinystories, synthetic, hf:OWNER/NAME[@REVISION], or an existing file or folder"
        raise SweepError(f"data must be {choices}, got {cut(source)!r}.")
    if is_folder:
        return _locate_in_folder(path)

    what = other_format(path.name)
    if what:
        problem = f"data must be plain text or a table, got {cut(str(path))!r}, {what}"
        remedy = _saved_remedy(path.parent) if path.suffix.lower() == ".arrow" else EXTRACT
        raise SweepError(f"{problem}. {remedy}")
    return DataFiles({TEXT_ROLE: [path]}, notes=_single_file_notes(path.name))


def _single_file_notes(name: str) -> tuple[str, ...]:
    notes = []
    try:
        role = role_of(name)
    except SweepError:  # a file that is named alone needs no role
        role = None
    if role in (VALID, TEST):
        notes.append(f"{cut(name, 60)} is named like {role} data, and most of it is for training.")
    shard = SHARD.search(name)
    if shard and int(shard[2]) > 1:
        notes.append(f"{cut(name, 60)} is one of {shard[2]} parts; the others are not read.")
    return tuple(notes)


def _saved_remedy(folder: Path) -> str:
    load = f"datasets.load_from_disk({cut(str(folder), 150)!r})"
    if (folder / "dataset_dict.json").exists():
        loop = f"for name, split in {load}.items(): split.to_parquet(f'{{name}}.parquet')"
        return f"Convert it with Python: {loop}"
    return f"Convert it with Python: {load}.to_parquet('train.parquet')"


def _locate_in_folder(folder: Path) -> DataFiles:
    subject = f"data folder {cut(str(folder))!r}"
    entries = sorted(folder.iterdir())
    _refuse_saved(folder, [entry.name for entry in entries], subject)
    left_out: dict[str, str] = {}
    files = defaultdict[str | None, list[Path]](list)
    unreadable = defaultdict[str | None, list[str]](list)
    for entry in entries:
        reason = _reason_to_leave_out(entry)
        if reason is None:
            files[role_of(entry.name)].append(entry)
            continue
        left_out[entry.name] = reason
        if reason == other_format(entry.name) != BACKUP:
            unreadable[role_of(entry.name)].append(entry.name)

    for role in (TRAIN, VALID):
        if unreadable[role] and not files[role]:
            problem = f"got {name_list(unreadable[role])}, {left_out[unreadable[role][0]]}"
            raise SweepError(f"{subject} must hold {role} data as text, {problem}. {EXTRACT}")
        _refuse_several_sets(files[role], role, subject)

    train = files[TRAIN]
    valid = files[VALID]
    unnamed = files[None]
    left_out |= {file.name: "named like test data" for file in files[TEST]}
    if not (train or valid or unnamed):
        raise SweepError(f"{subject} has no text file{_why_none(left_out)}. Add one.")
    if valid and not train:
        problem = f"must hold files named train with those for validation, got {_names(valid)}"
        remedy = "Name the files for training train, or rename these."
        raise SweepError(f"{subject} {problem}. {remedy}")
    if train and unnamed:
        _refuse_unclear_train(train, valid, unnamed, subject)
        reason = f"not named for training, as {cut(train[0].name, 60)} is"
        left_out |= {file.name: reason for file in unnamed}
    if not train:
        _refuse_hidden_roles(unnamed, subject)

    if valid:
        roles = {TRAIN: train, VALID: valid}
    else:
        roles = {TEXT_ROLE: train if train else unnamed}
    for paths in roles.values():
        _refuse_missing_shards([path.name for path in paths], subject)
    return DataFiles(roles, left_out)


def _names(paths: Sequence[Path]) -> str:
    return name_list([path.name for path in paths])


def _refuse_saved(folder: Path, names: Sequence[str], subject: str) -> None:
    has_arrow = any(_suffix(name) == ".arrow" for name in names)
    if "dataset_dict.json" in names or (has_arrow and "state.json" in names):
        problem = "must hold text or tables, got what `save_to_disk` of the library datasets wrote"
        raise SweepError(f"{subject} {problem}. {_saved_remedy(folder)}")


def _reason_to_leave_out(entry: Path) -> str | None:
    """Return why an entry of a folder is not read, whatever its role; None if it can be read."""
    if entry.name.startswith("."):
        return "hidden"
    if entry.is_dir():
        return "a sub-folder"
    if not entry.is_file():
        return "not a regular file"
    words = words_of(entry.name)
    stem = entry.name.lower().partition(".")[0]
    if (words and words[0] in ABOUT_DATA) or ABOUT_NAMES.fullmatch(stem):
        return "about the data"
    return other_format(entry.name)


def _why_none(left_out: dict[str, str]) -> str:
    reasons = [f"{name} ({reason})" for name, reason in left_out.items()]
    return f" that can be used, got {name_list(reasons)}" if reasons else ""


def _refuse_several_sets(files: Sequence[Path], role: str, subject: str) -> None:
    """Refuse files of one role unless they are parts of one, whose names differ in numbers."""
    sets = {}
    for file in files:
        shard = SHARD.search(file.name)
        total = int(shard[2]) if shard else None
        sets[re.sub(r"\d+", "0", file.name), total] = file
    if len(sets) > 1:
        problem = f"must hold one {role} file, or parts that differ in numbers alone"
        remedy = "Put the others elsewhere."
        raise SweepError(f"{subject} {problem}, got {_names(list(sets.values()))}. {remedy}")


def _refuse_hidden_roles(unnamed: Sequence[Path], subject: str) -> None:
    """Refuse files without a role of which one seems to be for validation by the others' names.

    Such are storiesvalid.txt, whatever the others are, and names that are equal without the words
    of two roles (storytrain.txt and storyval.txt) or of one (story.txt and storyval.txt).
    """
    wholes = {"".join(words_of(file.name)): file.name for file in unnamed}
    remedy = "Write its role apart (stories-valid.txt), rename it, or put it elsewhere."
    without: dict[str, tuple[str, str]] = {}  # role and name of a file by the rest of its name
    for file in unnamed:
        for role, rest in _without_a_role(file.name):
            other_role, other = without.setdefault(rest, (role, file.name))
            if role != TRAIN and rest in wholes:
                other = wholes[rest]
            elif other_role == role or other == file.name:
                continue
            problem = f"got {name_list([other, file.name])}, of which one may be {role} data"
            raise SweepError(f"{subject} must tell what is for training, {problem}. {remedy}")
    for file in unnamed:
        role_at_end = _ends_with_a_role(file.name)
        if role_at_end and (len(unnamed) > 1 or role_at_end != TRAIN):
            problem = f"got {cut(file.name, 60)}, which may be {role_at_end} data"
            raise SweepError(f"{subject} must tell what is for training, {problem}. {remedy}")


def _refuse_unclear_train(
    train: Sequence[Path], valid: Sequence[Path], unnamed: Sequence[Path], subject: str
) -> None:
    """Refuse a name such as the-train-to-york.txt among other files, if nothing else tells."""
    if not valid and not all(_names_only_a_role(file.name) for file in train):
        problem = f"must tell what is for training, got {_names(train)} and {_names(unnamed)}"
        raise SweepError(f"{subject} {problem}. Rename them, or put them into two folders.")


def _refuse_missing_shards(names: Sequence[str], subject: str) -> None:
    indices = defaultdict[tuple[str, int], set[int]](set)
    for name in names:
        shard = SHARD.search(name)
        if shard:
            number = int(shard[1])
            total = int(shard[2])
            indices[SHARD.sub("*", name), total].add(number)

    for (pattern, total), numbers in indices.items():
        first = 1 if total in numbers else 0
        if len(numbers) == total and min(numbers) == first:
            continue

        got = f"{len(numbers)} of {total} parts of {cut(pattern, 60)}"
        for number in range(first, first + total):
            if number not in numbers:
                got += f"; number {number} is missing"
                break
        raise SweepError(f"{subject} must hold all parts of a file, got {got}. Add them.")
