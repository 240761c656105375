"""The producer process: listens first, then builds the pipeline, then pumps, until all ranks have left or its rank
dies.

Threads: the main one builds and pumps (user code runs here); gRPC's serve ranks; one waits for the last rank to leave;
one watches the lifeline. When the lifeline ends, the process group is killed within a second, whatever the others do.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import linecache
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

_PARENT_POLL_SECONDS = 1.0
_EXIT_SECONDS = 5.0
_ORPHAN_SECONDS = 1.0
_FAREWELL_SECONDS = 2.0
_REFUSED_CODE = 3
# tensorflow/__init__.py imports one of these, and catches the ImportError.
_KERAS_OF_TENSORFLOW = ("keras.src.optimizers", "tf_keras.src.optimizers")


def watch_lifeline(fd: int, parent: int, scratch: str) -> None:
    while True:
        readable, _, _ = select.select([fd], [], [], _PARENT_POLL_SECONDS)
        if (readable and not os.read(fd, 1)) or os.getppid() != parent:
            # What the user's code cleans up goes with it, but not at the price of living on.
            killer = threading.Timer(_ORPHAN_SECONDS, _end)
            killer.daemon = True
            killer.start()
            atexit._run_exitfuncs()
            # The supervisor would remove it, but it may be dead.
            shutil.rmtree(scratch, ignore_errors=True)
            _end()


def _end() -> None:
    """Ends this process and all that it started. It leads its own session, so its group is its own."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os.killpg(0, signal.SIGKILL)


def finish(code: int = 0) -> None:
    """Ends this process in peace: what the user's code registered with `atexit` runs, within limits."""
    threading.Timer(_EXIT_SECONDS, _end).start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def take_lifeline() -> int:
    """Moves the lifeline away from standard input, so that user code that reads finds an end, not our pipe."""
    lifeline = os.dup(0)
    os.set_inheritable(lifeline, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return lifeline


def main() -> None:
    lifeline = take_lifeline()

    from kerasfeed.producer.launch import SCRATCH_VARIABLE, Launch, Progress

    scratch = os.environ.pop(SCRATCH_VARIABLE)
    try:
        launch = Launch.read_from(lifeline)
    except EOFError:
        # The rank is gone already, and with it whoever would have removed this.
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    for fd in (launch.control_fd, launch.progress_fd, launch.journal_fd):
        os.set_inheritable(fd, False)
    threading.Thread(
        target=watch_lifeline, args=(lifeline, launch.parent, scratch), name="kerasfeed-lifeline", daemon=True
    ).start()
    control = os.fdopen(launch.control_fd, "w", buffering=1)

    def report(**news: Any) -> None:
        control.write(json.dumps(news) + "\n")
        control.flush()

    # The address goes out before TensorFlow is imported, which takes seconds.
    from kerasfeed.options import FeedOptions
    from kerasfeed.producer.service import FeedService, status_message

    options = FeedOptions(**launch.options)
    agreed = {**options.agreed(), "size": launch.size}
    service = FeedService(options.name, launch.size, launch.token, agreed, _log)
    try:
        server, port = service.start(launch.host, launch.port)
    except OSError as error:
        report(refused=str(error))
        finish(_REFUSED_CODE)
        return
    report(port=port)

    sys.path[:] = launch.module_path
    stand_in_for_script(launch.script, launch.sources)

    def take_leave(window: Any) -> None:
        window.wait_until_drained()
        report(statistics=status_message(window, 0).SerializeToString().hex())
        server.stop(_FAREWELL_SECONDS).wait()
        finish()

    _serve(launch, options, service, report, Progress(launch.progress_fd), scratch, take_leave)
    # Whoever takes leave ends the process; if there is nothing to take leave of, the end of the lifeline does.
    threading.Event().wait()


def stand_in_for_script(script: str, sources: dict[str, str]) -> None:
    """Makes `__main__` an empty stand-in for the rank's script, whose functions come by value.

    With this module in its place AutoGraph would look for their source code here, and not find it.
    """
    module = types.ModuleType("__main__")
    if script:
        module.__file__ = script
    sys.modules["__main__"] = module
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def keep_generated_code_in(folder: str) -> None:
    """Lets AutoGraph write its files where they go away even if this process can't remove them."""
    from tensorflow.python.autograph.pyct import loader

    if hasattr(loader, "tempfile"):
        make = functools.partial(tempfile.NamedTemporaryFile, dir=folder)
        loader.tempfile = types.SimpleNamespace(NamedTemporaryFile=make)


def import_tensorflow() -> types.ModuleType:
    """Imports TensorFlow without what takes a third to a half of the time and is no use here.

    `import tensorflow` imports Keras too, so that SavedModels with Keras optimizers can be loaded, and goes on without
    it where it is missing. A pipeline that uses `tf.keras` or `keras` still gets it, at that moment. The garbage
    collector is off meanwhile: it would look at all modules again and again, and find nothing.
    """
    missing = [name for name in _KERAS_OF_TENSORFLOW if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(missing))
    gc.disable()
    try:
        return importlib.import_module("tensorflow")
    finally:
        for name in missing:
            if modules.get(name, ...) is None:
                del modules[name]
        gc.freeze()
        gc.enable()


def load_source(launch: Any) -> tuple[Any, Any]:
    """Returns `dataset_fn` and `None`, or a dataset's graph and its element spec."""
    import cloudpickle

    from kerasfeed import spec

    if launch.payload_kind != "function":
        return launch.payload, spec.decode_spec(launch.source_spec.encode())
    function = cloudpickle.loads(launch.payload)
    for name in launch.modules:
        # Only AutoGraph looks for it, and what can't be imported here was made by hand.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    return function, None


def _serve(
    launch: Any,
    options: Any,
    service: Any,
    report: Any,
    progress: Any,
    scratch: str,
    take_leave: Callable[[Any], None],
) -> None:
    """Builds the pipeline and pumps it. If it can't be built, ranks that come are told why."""
    try:
        tf = import_tensorflow()

        from kerasfeed.native import engine as engines
        from kerasfeed.producer import pump
        from kerasfeed.producer.parts import Settings, make_parts
        from kerasfeed.producer.pipeline import Pipeline
        from kerasfeed.producer.service import StateKeeper
        from kerasfeed.producer.verifier import Verifier
        from kerasfeed.producer.way_back import WayBack
        from kerasfeed.producer.waypoint import Waypoint
        from kerasfeed.producer.window import EpochCount
        from kerasfeed.proto import feed_pb2
        from kerasfeed.schedule import Segment

        keep_generated_code_in(scratch)
        engine = engines.load()
        if options.deterministic:
            tf.config.experimental.enable_op_determinism()
        source, source_spec = load_source(launch)
        lengths = {int(pass_): elements for pass_, elements in launch.pass_lengths.items()}
        whole = launch.restored[0] if launch.restored is not None else 0
        pipeline = Pipeline(
            source,
            source_spec,
            launch.size,
            launch.seed,
            launch.restarted or launch.restored is not None,
            lengths,
            whole,
            scratch,
            _log,
        )
        window_options = {
            "size": launch.size,
            "prefetch": options.prefetch_steps,
            "max_bytes": options.max_buffer_bytes,
            "steps_per_epoch": options.steps_per_epoch,
            "segment": Segment(**launch.segment) if launch.segment is not None else None,
            "start_timeout": options.start_timeout,
            "complete": lambda: report(complete=True),
            "pass_ended": lambda pass_, elements: report(pass_length=[pass_, elements]),
            "epoch_ended": lambda epoch, count: report(epoch=[epoch, count.elements, count.steps, count.dropped]),
            "pass_lengths": lengths,
            "cardinality": pipeline.cardinality,
            "left": {int(rank): {int(e): n for e, n in trained.items()} for rank, trained in launch.left.items()},
            "rank_left": lambda rank, trained: report(left=rank, trained=trained),
            "counts": {e: EpochCount(elements, steps, dropped, True) for e, elements, steps, dropped in launch.counts},
        }
        settings = Settings(
            spec=pipeline.spec,
            full=options.verify == "full",
            journal_fd=launch.journal_fd,
            host=launch.host,
            # Not launch.port: that of the producer before this one, whose neighbour may be anybody's.
            port=options.port,
            max_buffer_bytes=options.max_buffer_bytes,
            ahead=options.prefetch_steps * launch.size,
            free_bytes=options.free_bytes,
        )
        parts = make_parts(engine, settings, window_options, progress, _log)
    except BaseException:  # user code may raise anything, and whoever waits has to hear of it
        what = "dataset_fn" if launch.payload_kind == "function" else "the dataset"
        message = f"{what} raised before the first element:\n{traceback.format_exc()}"
        report(failed=message)
        service.failed(message)
        return
    if options.steps_per_epoch is not None:
        cardinality = options.steps_per_epoch
    else:
        cardinality = pipeline.cardinality if pipeline.cardinality < 0 else pipeline.cardinality // launch.size
    welcome = feed_pb2.Welcome(
        spec=pipeline.spec,
        cardinality=cardinality,
        seed=launch.seed,
        elements=pipeline.cardinality,
        fingerprint=pipeline.fingerprint,
        foreseen=launch.foreseen,
    )
    restored, before = None, {}
    if launch.restored is not None:
        pass_, element, digest = launch.restored
        restored, before = (pass_, element), {0: digest}
        if launch.parts:
            try:
                waypoint = Waypoint.from_parts(pass_, launch.parts)
            except Exception as error:  # a state of another make: its checksum holds, its parts are strange
                _log(f"the parts of this feed's state can't be read, the pipeline is replayed instead: {error!r}")
            else:
                pipeline.offer(waypoint)
                before[waypoint.place[1]] = launch.parts.get("skipped", b"").decode()
    verifier = Verifier(
        parts.digester,
        parts.journal,
        restored,
        before,
        full=options.verify == "full",
        warn=_log if options.verify == "warn" else None,
    )
    way_back = WayBack(
        options.resume,
        options.max_state_bytes,
        pipeline.unfit_for_iterators,
        pipeline.unfit_for_snapshots,
        pipeline.why_unsteady(options.deterministic),
        _log,
    )
    service.ready(parts.window, welcome, StateKeeper(verifier.digest_before, way_back), parts.data)

    # The pump may be inside a slow pipeline when the last rank leaves: nobody waits for it then.
    threading.Thread(target=take_leave, args=(parts.window,), name="kerasfeed-leave", daemon=True).start()

    pump.run(parts.window, pipeline, verifier, way_back, progress, parts.flow)


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
