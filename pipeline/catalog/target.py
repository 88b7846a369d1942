"""What to build: a key of the catalog becomes a target, and a target has a name and a destination."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.catalog.schema import REPOSITORY, Base, Catalog, Model, Platform, Profile, check_tag_template
from pipeline.errors import UsageError, quoted

ALL = "all"
"""The key of an image with every model of the catalog, unless the catalog gives it another meaning."""

LIST = "list"
"""The script that prints which models are inside."""

OWN_SCRIPTS = frozenset({"healthcheck", LIST})
"""Scripts that every image has; no profile can have these names."""

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class Target:
    """One image to build: its models in order, the profile that is its command, and the base to layer on."""

    key: str
    models: tuple[tuple[str, Model], ...]
    """Model keys and models, in the catalog's order; one, except in a set."""
    profile_name: str
    """The profile whose script is the image's command, or is taken for it where a set only lists its models."""
    base_key: str
    base: Base
    platform: Platform
    lists: bool = False
    """Whether the image's command prints which models are inside, as that of a set does."""

    @property
    def script(self) -> str:
        """The script that is the image's command, without `.sh`."""
        return LIST if self.lists else self.profile_name

    @property
    def default_model(self) -> Model:
        """The model that the profile serves."""
        return next(model for _, model in self.models if self.profile_name in model.profiles)

    @property
    def profile(self) -> Profile:
        """The profile named by `profile_name`."""
        return self.default_model.profiles[self.profile_name]


@dataclass(frozen=True)
class BuildKey:
    """A key that `find_target` takes, and one line that says what it builds."""

    key: str
    description: str
    chips: int
    """Chips that the image's command needs: which runner may smoke-test it."""


def build_keys(catalog: Catalog) -> tuple[BuildKey, ...]:
    """Every key that can be built: models, each model's further profiles, sets; in the catalog's order."""
    return tuple(_build_keys(catalog))


def _build_keys(catalog: Catalog) -> Iterator[BuildKey]:
    for key, model in catalog.models.items():
        first = model.default_profile
        for name, profile in model.profiles.items():
            chips = f"{profile.tensor_parallel} chip" + ("s" if profile.tensor_parallel > 1 else "")
            served = f"{model.title}, {model.quantization}, {chips}, {name}.sh"
            yield BuildKey(key if name == first else name, served, profile.tensor_parallel)
    for key, members in catalog.sets.items():
        chips_needed = _default_profile(catalog.models[members[0]]).tensor_parallel
        yield BuildKey(key, f"{len(members)} models in one image: {', '.join(members)}", chips_needed)


def _default_profile(model: Model) -> Profile:
    return model.profiles[model.default_profile]


def targets(
    catalog: Catalog,
    keys: tuple[str, ...],
    *,
    base: str | None = None,
    platform: str | None = None,
    profile: str | None = None,
) -> tuple[Target, ...]:
    """A target per key, each once, in the order given. Raises UsageError as `find_target` does."""
    return tuple(
        find_target(catalog, key, base=base, platform=platform, profile=profile)
        for key in dict.fromkeys(keys)
    )


def platforms_of(catalog: Catalog, text: str | None, base: str | None = None) -> tuple[str | None, ...]:
    """The platforms that `linux/arm64,linux/amd64` or `all` (those of the base) mean; one None when absent.

    Raises UsageError for a platform that is given twice or is none.
    """
    if text is None:
        return (None,)
    if text == "all":
        return find_base(catalog, base).platforms
    names = tuple(text.split(","))
    if len(set(names)) != len(names) or not all(names):
        raise UsageError(
            f"'{quoted(text)}' is not a list of platforms",
            where="--platform",
            mend="write linux/arm64, linux/arm64,linux/amd64, or all",
        )
    return names


def find_target(
    catalog: Catalog,
    key: str,
    *,
    base: str | None = None,
    platform: str | None = None,
    profile: str | None = None,
) -> Target:
    """The target of a model key, a profile's name, a set's name, or ALL for every model of the catalog.

    A profile's name means its model with that profile as the command. `base` is a key of the catalog's bases
    and `platform` one of that base's platforms; absent, the catalog's defaults. `profile` is to be the command; absent,
    a model's first one is, and a set lists its models. Raises UsageError for any key, base, platform or profile that
    is not there.
    """
    members, profile_name = _members(catalog, key)
    chosen_profile = profile_name if profile is None else _profile_of(catalog, members, profile, key)
    base_key = base or catalog.default_base
    chosen = find_base(catalog, base_key)
    wanted = platform or catalog.default_platform
    found = next((known for known in chosen.platforms if known == wanted), None)
    if found is None:
        raise UsageError(
            f"the base '{base_key}' has no platform '{quoted(wanted)}'",
            mend=f"take one of {', '.join(chosen.platforms)}, or add it to the base's platforms",
        )
    return Target(
        key=key,
        models=tuple((member, catalog.models[member]) for member in members),
        profile_name=chosen_profile,
        base_key=base_key,
        base=chosen,
        platform=found,
        lists=profile is None and _is_set(catalog, key),
    )


def _is_set(catalog: Catalog, key: str) -> bool:
    return key not in catalog.models and (key in catalog.sets or key == ALL)


def _profile_of(catalog: Catalog, members: tuple[str, ...], profile: str, key: str) -> str:
    known = [name for member in members for name in catalog.models[member].profiles]
    if profile not in known:
        raise UsageError(
            f"'{quoted(key)}' has no profile '{quoted(profile)}'",
            where="--profile",
            mend=f"take one of {', '.join(known)}",
        )
    return profile


def find_base(catalog: Catalog, name: str | None) -> Base:
    """A base by its key; the default one when none is named. Raises UsageError for a key that is not there."""
    key = name or catalog.default_base
    if key not in catalog.bases:
        raise UsageError(
            f"the catalog has no base '{quoted(key)}'",
            mend=f"take one of {', '.join(catalog.bases)}, or add it under 'bases'",
        )
    return catalog.bases[key]


def _members(catalog: Catalog, key: str) -> tuple[tuple[str, ...], str]:
    if key in catalog.models:
        return (key,), catalog.models[key].default_profile
    if key in catalog.sets:
        return catalog.sets[key], catalog.models[catalog.sets[key][0]].default_profile
    for model_key, model in catalog.models.items():
        if key in model.profiles:
            return (model_key,), key
    if key == ALL:
        return tuple(catalog.models), next(iter(catalog.models.values())).default_profile
    known = [
        *catalog.models,
        *(name for model in catalog.models.values() for name in model.profiles),
        *catalog.sets,
    ]
    close = difflib.get_close_matches(key.lower(), known, n=3, cutoff=0.5)
    raise UsageError(
        f"the catalog has no model, profile or set '{quoted(key)}'",
        mend=(f"did you mean {' or '.join(close)}? " if close else "") + "'duopack list' shows every key",
    )


def image_name(target: Target) -> str:
    """The last part of the image's repository: the model's `image`, else its served name; a set's key."""
    if len(target.models) == 1:
        _, model = target.models[0]
        return model.image or repository_part(_default_profile(model).served_name)
    return repository_part(target.key)


def repository_part(name: str) -> str:
    """A name in the grammar of a repository's part: lower case, and runs of separators made one."""
    lowered = re.sub(r"[^a-z0-9._-]", "-", name.lower())
    return re.sub(r"[._-]{2,}", "-", lowered).strip("._-")


def image_tag(catalog: Catalog, target: Target, template: str | None = None) -> str:
    """The image's tag; for a set that lists its models {profile} is the set's key.

    A platform that is not the catalog's default is added, so that none replaces another.
    Raises UsageError when the template cannot be filled in or gives no valid tag.
    """
    mend = "use {base}, {profile}, {key} and plain text in DUOPACK_TAG or publish.tag"
    chosen = template or catalog.publish.tag
    try:
        check_tag_template(chosen)
    except ValueError as error:
        raise UsageError(f"the tag cannot be made: {error}", mend=mend) from None
    profile = target.key if target.lists else target.profile_name
    tag = chosen.format(base=target.base_key, profile=profile, key=target.key)
    if target.platform != catalog.default_platform:
        tag += f"-{target.platform.partition('/')[2]}"
    if not _TAG.fullmatch(tag):
        raise UsageError(f"'{quoted(tag)}' is not a valid image tag", mend=mend)
    return tag


def default_destination(
    catalog: Catalog,
    target: Target,
    *,
    registry: str | None = None,
    tag: str | None = None,
    work: str = "build",
) -> str:
    """Where the image goes when no --to is given.

    `registry` (DUOPACK_REGISTRY), else the catalog's publish.repository, with the image's name and `tag`
    (DUOPACK_TAG), else publish.tag. With neither repository, the OCI layout `oci:<work>/<key>`. Raises
    UsageError when a variable is wrong.
    """
    repository = (registry or "").strip().removeprefix("docker://").rstrip("/")
    if not repository and not catalog.publish.repository:
        return f"oci:{work}/{target.key}"
    if repository and not re.fullmatch(REPOSITORY, repository):
        raise UsageError(
            f"'{quoted(repository)}' is not a registry with a namespace",
            where="DUOPACK_REGISTRY",
            mend="write a host and a path in lower case, without a tag: registry.example:5000/team",
        )
    chosen = image_tag(catalog, target, (tag or "").strip() or None)
    return f"docker://{repository or catalog.publish.repository}/{image_name(target)}:{chosen}"
