"""Finds recipes in `recipes/`: next to the package (a checkout), in the working directory, or in an installed package.

A recipe is a YAML file for LightningCLI or a Python script. Its name is its path below `recipes/` without the suffix.
Its description is the first comment line (YAML) or the first line of the docstring (script). If a YAML file names
classes of a Python file in the same folder, that file belongs to the YAML recipe and is not a recipe. The files of
`recipes/launch/`, which start runs, are not recipes either.

A line `# lightning-diloco: ~=0.1` states the package versions of a recipe. Other versions refuse it.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_diloco import __version__
from lightning_diloco.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".py")
LAUNCH = "launch"
_VERSIONS = r"^# lightning-diloco: *(.+?) *$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One recipe.

    Args:
        name: display name, such as "tiny/gpt".
        path: path of the file.
        model: class of the model, or "script".
        description: one line.
    """

    name: str
    path: Path
    model: str
    description: str


def roots() -> tuple[Path, ...]:
    """Return the folders that are searched for recipes, without duplicates."""
    package = Path(__file__).resolve().parents[1]
    return tuple(dict.fromkeys((package.parent / "recipes", Path.cwd() / "recipes", package / "recipes")))


def find(folders: Sequence[Path] | None = None) -> list[Recipe]:
    """Return all recipes, sorted by name; for equal names, the first folder wins."""
    found: dict[str, Recipe] = {}
    for folder in roots() if folders is None else folders:
        for path in _files(folder):
            name = path.relative_to(folder).as_posix()
            name = name if path.suffix == ".py" else name.removesuffix(path.suffix)
            found.setdefault(name, _read(name, path))
    return [found[name] for name in sorted(found)]


def resolve(target: str) -> Path:
    """Return the file of a recipe, given by path or name, if it is for this version.

    Raises:
        ConfigError: there is no such file (the message names the nearest), or it is a recipe of another version.
    """
    path = find_file(target)
    if found := re.search(_VERSIONS, path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE):
        _check_version(path, found[1])
    return path


def find_file(target: str) -> Path:
    """Return the file of a recipe of any version, given by path or name.

    Raises:
        ConfigError: there is no such file; the message names the nearest.
    """
    path = Path(target)
    if path.is_file() and path.suffix in SUFFIXES:
        return path
    if path.is_file():
        raise ConfigError(f"{target}: a recipe ends in {', '.join(SUFFIXES)}; rename the file, or see `diloco ls`")
    known = {recipe.name: recipe.path for recipe in find()}
    if target in known:
        return known[target]
    raise ConfigError(_not_found(target, known))


def _check_version(path: Path, versions: str) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        is_mine = SpecifierSet(versions).contains(__version__, prereleases=True)
    except InvalidSpecifier as error:
        raise ConfigError(
            f"{path}: `# lightning-diloco: {versions}` names no versions; use pip's syntax, such as ~=0.1"
        ) from error
    if not is_mine:
        raise ConfigError(
            f"{path} is a recipe for lightning-diloco {versions}, this is {__version__}; "
            f"pip install 'lightning-diloco{versions}', or adapt the recipe to this version (see `diloco ls`) and "
            "change its `# lightning-diloco:` line"
        )


def modules_beside(recipe: Path) -> list[Path]:
    """Return the Python files in the folder of a YAML recipe whose classes it names."""
    text = "" if recipe.suffix == ".py" else recipe.read_text(encoding="utf-8", errors="replace")
    named = dict.fromkeys(re.findall(r"class_path:\s*[\"']?(\w+)\.", text))
    return [path for name in named if (path := recipe.with_name(f"{name}.py")).is_file()]


def _not_found(target: str, known: dict[str, Path]) -> str:
    looked = ", ".join(str(folder) for folder in roots())
    names = {**{str(path): name for name, path in known.items()}, **{name: name for name in known}}
    wanted = target.removeprefix("recipes/").removesuffix(".yaml").removesuffix(".yml")
    near = dict.fromkeys(names[match] for match in difflib.get_close_matches(wanted, names, n=3, cutoff=0.5))
    hint = f"the nearest: {', '.join(near)}; " if near else ""
    return (
        f"no recipe or script {target!r}: neither a file {Path(target).absolute()} nor a name in {looked}; "
        f"{hint}`diloco ls` lists all"
    )


def _files(folder: Path) -> Iterator[Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES and path.is_file()]
    found = [path for path in found if path.parts[len(folder.parts)] != LAUNCH]
    parts = {part for path in found for part in modules_beside(path)}
    return (path for path in found if path not in parts)


def _read(name: str, path: Path) -> Recipe:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        return Recipe(name=name, path=path, model="script", description=_docstring_line(text))
    return Recipe(name=name, path=path, model=_model(text), description=_comment_line(text))


def _comment_line(text: str) -> str:
    return next((line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("#")), "")


def _docstring_line(text: str) -> str:
    try:
        lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    except SyntaxError:
        return "not valid Python"
    return lines[0] if lines else ""


def _model(text: str) -> str:
    import yaml

    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError:
        return "not valid YAML"
    model = content.get("model") if isinstance(content, dict) else None
    class_path = model.get("class_path", "") if isinstance(model, dict) else str(model or "")
    return str(class_path).rpartition(".")[2]
