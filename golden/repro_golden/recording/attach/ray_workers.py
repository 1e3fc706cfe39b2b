"""How the recorder gets into the workers of Ray, whose environment Ray makes.

A worker has the environment of its node's raylet, over it the runtime environment of its job, and over that its actor's
or task's. A cluster that this process starts hands our variables on, and only a PYTHONPATH that somebody sets drops
them: our folder is put before it. A cluster that was there before knows nothing of us, and its nodes may not have our
files: there the job's runtime environment has our variables, and brings the recorder along as one of its py_modules.

Ray ends workers without `atexit`, so the recording is made whole whenever a task or an actor's method returns.

Nothing here raises into the program or changes an object of the user's. All nodes must see the folder that receives
the raw records: where there are several, it is on a file system that they share.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import repro_golden
from repro_golden.base.clean import one_line
from repro_golden.recording.attach.base.settings import VARIABLE, Settings

__all__ = ["arm_ray"]

_PACKAGE = Path(__file__).resolve().parents[2]
_SHIPPED = "REPRO_RAY_MODULES"
"""In a job's variables: the URIs of the recorder among its py_modules."""

_uris: list[str] = os.environ.get(_SHIPPED, "").split()


def arm_ray(utils: Any, when: Callable[[str, Callable[[Any], None]], object]) -> None:
    """Hook what makes the environment of Ray's workers, and what runs their tasks.

    Args:
        utils: the module `ray._private.utils`, which the others that are hooked import from.
        when: does something with a module once the program has imported it.
    """
    utils.get_runtime_env_info = _given(utils.get_runtime_env_info, _kept)
    when("ray._private.runtime_env.py_modules", _upload)
    when("ray._private.worker", _driver)
    when("ray._private.function_manager", _tasks)
    when("ray.client_builder", _client)


def _given(function: Any, change: Callable[[Any], Any]) -> Any:
    """`function`, given something else for its first argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _harmless():
            args = (change(args[0]), *args[1:])
        return function(*args, **kwargs)

    return call


def _kept(env: Any) -> Any:
    """A RuntimeEnv of a job, an actor or a task in which what it sets does not hide what its workers would have had."""
    changes: dict[str, Any] = {}
    if "PYTHONPATH" in (env.get("env_vars") or {}):
        changes["env_vars"] = _with_path(env["env_vars"])
    modules, shipped = env.get("py_modules"), [] if _started_here() else _uris
    if modules is not None and not set(shipped) <= set(modules):  # an actor's replace those of its job
        changes["py_modules"] = [*shipped, *modules]
    return type(env)(_validate=False, **{**env, **changes}) if changes else env


def _with_path(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables of which PYTHONPATH, where it is set, begins with our folder."""
    path = variables.get("PYTHONPATH")
    site = str(Path(os.environ["REPRO_INSTRUMENT"], *__name__.split(".")[1:-1], "site"))
    if path is None or site in path.split(os.pathsep):
        return dict(variables)
    return {**variables, "PYTHONPATH": os.pathsep.join([site, *([path] if path else [])])}


def _node() -> Any:
    """This process's node in the cluster that it is connected to."""
    return getattr(sys.modules.get("ray._private.worker"), "_global_node", None)


def _started_here() -> bool:
    """Whether this process is connected to a cluster that it started."""
    return bool(getattr(_node(), "head", False))


def _upload(module: Any) -> None:
    """Add the recorder where drivers, Ray clients and job submissions upload what a job brings along."""
    upload = module.upload_py_modules_if_needed

    @functools.wraps(upload)
    def call(runtime_env: Any, *args: Any, **kwargs: Any) -> Any:
        with _harmless():
            driver = _node() is not None and "upload_fn" not in kwargs
            if not (driver and _started_here()):
                shipped = _with_recorder(runtime_env, lambda ours: upload(ours, *args, **kwargs))
                if driver:
                    runtime_env = shipped
                else:  # a copy of the user's, and Ray reads more of it than what is returned
                    runtime_env.update(shipped)
        return upload(runtime_env, *args, **kwargs)

    module.upload_py_modules_if_needed = call


def _with_recorder(env: Mapping[str, Any], upload: Callable[[dict[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """A job's runtime environment that brings the recorder along."""
    variables, modules = env.get("env_vars") or {}, env.get("py_modules") or []
    # what Ray will not take is left for Ray to say
    if not isinstance(modules, list) or not isinstance(variables, Mapping) or _SHIPPED in variables:
        return dict(env)
    variables = {**_with_path(variables), **_ours()}
    if env.get("container") or env.get("image_uri"):  # Ray takes no modules beside an image
        return {**env, "env_vars": {**_wanted(), **variables}}
    with _staged() as folder:  # by itself, so that no "excludes" of the user's are meant for it
        _uris[:] = upload({"py_modules": [folder]})["py_modules"]
    # first, because our sitecustomize runs one of theirs, and not the other way round
    return {**env, "env_vars": {**_wanted(), **variables, _SHIPPED: " ".join(_uris)}, "py_modules": [*_uris, *modules]}


def _wanted() -> dict[str, str]:
    """Variables that workers are to have where nobody sets them."""
    return dict(Settings.from_text(os.environ[VARIABLE]).variables)


def _ours() -> dict[str, str]:
    # Ray expands $NAME in values, and JSON can do without the sign
    trace = os.environ["REPRO_TRACE"].replace("$", "\\u0024")
    return {"REPRO_TRACE": trace, "REPRO_INSTRUMENT": os.environ["REPRO_INSTRUMENT"]}


@contextlib.contextmanager
def _staged() -> Iterator[str]:
    """The recorder as one module that Python imports when it starts, with the package inside."""
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "sitecustomize"
        shutil.copytree(_PACKAGE, module / "repro_golden", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(Path(__file__).with_name("site") / "sitecustomize.py", module / "__init__.py")
        yield str(module)


def _driver(module: Any) -> None:
    """Let a job without a runtime environment have one, if its cluster was there before."""
    connect = module.connect

    @functools.wraps(connect)
    def call(node: Any, *args: Any, **kwargs: Any) -> Any:
        job: Any = kwargs.get("job_config")
        with _harmless():
            attached = job is not None and kwargs.get("mode") == module.SCRIPT_MODE and not node.head
            if attached and not job._client_job and not job.runtime_env:
                job.set_runtime_env({"env_vars": {**_wanted(), **_ours()}})
        return connect(node, *args, **kwargs)

    module.connect = call
    module._merge_runtime_env = _given(module._merge_runtime_env, _without_recorder)


def _without_recorder(env: Any) -> Any:
    """The runtime environment of a submitted job as the user wrote it: its driver may set only what that does not."""
    variables = dict((env or {}).get("env_vars") or {})
    if _SHIPPED not in variables:
        return env
    shipped = variables.pop(_SHIPPED).split()
    wanted = _wanted()
    left = {
        "env_vars": {k: v for k, v in variables.items() if k not in _ours() and (k, v) not in wanted.items()},
        "py_modules": [uri for uri in env.get("py_modules") or [] if uri not in shipped],
    }
    return {name: value for name, value in {**env, **left}.items() if value or name not in left}


def _client(module: Any) -> None:
    """Let a Ray client, which changes the runtime environment that it is given, change a copy."""
    builder = module.ClientBuilder
    set_env = builder.env

    @functools.wraps(set_env)
    def call(self: Any, env: Any) -> Any:
        return set_env(self, dict(env) if isinstance(env, Mapping) else env)

    builder.env = call


def _tasks(module: Any) -> None:
    """Write what is in flight before a task or an actor's method gives back its result."""
    manager = module.FunctionActorManager
    assert "function" in module.FunctionExecutionInfo._fields  # here it harms nobody
    get_execution_info = manager.get_execution_info

    @functools.wraps(get_execution_info)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        info = get_execution_info(self, *args, **kwargs)
        return info._replace(function=_settling(info.function))

    manager.get_execution_info = call


def _settling(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            out = function(*args, **kwargs)
        finally:
            _settle()
        return _awaited(out) if inspect.iscoroutine(out) else out

    return call


async def _awaited(coroutine: Any) -> Any:
    try:
        return await coroutine
    finally:
        _settle()


def _settle() -> None:
    with _harmless():
        settle = getattr(repro_golden, "_settle", None)
        if settle is not None:
            settle()


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """Let nothing that goes wrong inside reach the program."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        with contextlib.suppress(Exception):  # the program's stderr may be closed, or full
            print(f"repro: workers of Ray may not be recorded ({text})", file=sys.stderr)
