"""Making, removing and renaming names on the mount: one function a system call, over the view.

Responsibility: the steps and their order; errors are those of `kvfs.errors`. Calls from the native loop
(mounts.upcalls) and pyfuse3's handlers (mounts.handlers) use them.

Invariants: who asked for a removal or rename is answered (`Answer`) once the store's index has it and the loop and the
tree show it. What follows in the step, its records among it, is nothing of which anybody could see the lack.

Concurrency: the service's trio thread; each is one step.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable

from kvfs import paths
from kvfs.errors import CrossDevice, Exists, InvalidRequest, IsDirectory, KvfsError, NotDirectory, NotEmpty
from mounts.kernel.nodes import Node
from mounts.tree.view import View
from tiers.model.objects import Attributes, Name

log = logging.getLogger("kvfs.mount")

Answer = Callable[[], None]
"""Answers whoever asked for a change, or has that done once it is durable; called once, unless the change fails."""

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
"""Flags of renameat2(2)."""


def make_directory(view: View, parent: Node, component: bytes, *, mode: int, uid: int, gid: int) -> Node:
    """Make a directory, mkdir(2); on the mount's root it is a bucket."""
    if parent.heir_gid >= 0:
        mode, gid = mode | stat.S_ISGID, parent.heir_gid
    if parent.parent is None:
        view.store.create_bucket(component, uid=uid, gid=gid, mode=mode)
    else:
        place = view.place(parent, component)
        known = view.nodes.child(parent, component)
        if known is not None and known.draft is not None:
            raise Exists(f"{place} is being written")
        view.store.make_directory(
            Name(place.bucket, place.key + b"/"), Attributes(mode=mode, uid=uid, gid=gid)
        )
    view.touch(parent)
    node = view.need(parent, component)
    view.names.know(node, ())
    return node


def make_link(view: View, parent: Node, component: bytes, target: bytes, *, uid: int, gid: int) -> Node:
    """Make a symbolic link, symlink(2). Nothing here looks at where it leads: that is the kernel's."""
    place = view.place(parent, component)
    if view.find(parent, component) is not None:
        raise Exists(f"{place} exists")
    gid = parent.heir_gid if parent.heir_gid >= 0 else gid
    view.store.make_link(place, target, Attributes(uid=uid, gid=gid))
    view.touch(parent)
    return view.need(parent, component)


def remove_directory(view: View, parent: Node, component: bytes) -> None:
    """Remove a directory, rmdir(2)."""
    node = view.need(parent, component)
    if not node.directory:
        raise NotDirectory(f"{component.decode(errors='replace')} is a file")
    if view.nodes.has_drafts_below(node):
        raise NotEmpty(f"files below {component.decode(errors='replace')} are being written")
    name = view.nodes.name(node)
    try:
        with view.own_change():
            if parent.parent is None:
                view.store.remove_bucket(component)
            else:
                view.store.remove_directory(name)
                view.keep_above(name)
    except NotEmpty:
        _log_hidden(view, name)
        raise
    view.touch(parent)
    view.gone(node)


def _log_hidden(view: View, directory: Name) -> None:
    """Log what keeps a directory from being removed, if a listing does not show that."""
    page = view.store.names.list(directory.bucket, prefix=directory.key, after=directory.key, limit=1)
    if page.entries and not paths.is_path(page.entries[0][0]):
        log.info(
            "%s is not empty: the mount cannot show keys such as %r; `kvfs ls -r` lists and `kvfs rm -r` removes them",
            directory,
            page.entries[0][0].decode(errors="replace"),
        )


def remove_file(view: View, parent: Node, component: bytes, answer: Answer = lambda: None) -> None:
    """Remove a file or symbolic link, unlink(2)."""
    node = view.need(parent, component)
    if node.directory:
        raise IsDirectory(f"{component.decode(errors='replace')} is a directory")
    opened = node.draft

    def show() -> None:
        view.nodes.unlink(node)
        view.touch(parent)
        if opened is None:
            view.backings.node_dead(node.nodeid)  # or the loop answers GETATTR with its former link
            answer()

    if not view.remove_sealed(view.nodes.name(node), show):
        show()
    view.gone(node)
    if node.draft is not None:
        view.drafts.persistence.drop_snapshot(node.draft)
    if opened is not None:
        answer()


def rename(
    view: View,
    above: Node,
    component: bytes,
    below: Node,
    new_component: bytes,
    flags: int,
    answer: Answer = lambda: None,
) -> None:
    """Rename, renameat2(2). A draft moves to the new name; other doors see what it replaces until it is published."""
    if flags & RENAME_EXCHANGE:
        raise InvalidRequest("RENAME_EXCHANGE: two names cannot be exchanged in one step here")
    node = view.need(above, component)
    if above.parent is None or (below.parent is None and node.directory):
        raise CrossDevice("a bucket is not renamed, and a directory becomes one by copying")
    target = view.place(below, new_component)
    known = view.find(below, new_component)
    if known is node:
        answer()
        return
    if known is not None:
        _check_replaceable(view, node, known, replace=not flags & RENAME_NOREPLACE)
    is_all = node.info is not None and known is None  # nothing but its name changes

    def show() -> None:
        if known is not None:
            view.nodes.unlink(known, unresolved=known.directory)
        view.nodes.move(node, below, new_component)
        view.touch(above)
        if below is not above:
            view.touch(below)
        if is_all:
            answer()

    _rename_sealed(view, node, target, show)
    _show_renamed(view, node, target, known)
    if not is_all:
        answer()


def draft_to_settle(view: View, above: Node, component: bytes, below: Node) -> Node | None:
    """Return the draft that a rename moves into a durable bucket, if `DraftPersistence.persist` has to come first."""
    node = view.nodes.child(above, component)
    if node is None or node.draft is None or below.parent is None:
        return None
    durable = view.store.bucket(view.nodes.name(below).bucket).durable
    return node if durable and not node.draft.is_settled else None


def renamed(view: View, node: Node, above: Node, below: Node, new_component: bytes, when_ns: int) -> None:
    """Repeat the native loop's rename of a draft to a free name, in the tree and in the store.

    Whatever happened meanwhile, the rename was first: a draft that was published before this is renamed as an object,
    and the draft will replace an object that another door sealed under the new name.
    """
    if not node.linked:
        view.backings.unlink(below.nodeid, new_component, node.nodeid)
        return
    target = view.nodes.child_name(below, new_component)
    known = view.nodes.child(below, new_component)

    def show() -> None:
        if known is not None:
            view.nodes.unlink(known, unresolved=known.directory)
        view.nodes.move(node, below, new_component, mirrored=True)
        view.touch(above, when_ns)
        view.touch(below, when_ns)

    try:
        _rename_sealed(view, node, target, show)
    except KvfsError as error:
        log.warning("%s cannot be renamed to %s: %s", view.nodes.name(node), target, error)
        view.backings.mark_unresolved(below.nodeid, new_component, node.nodeid)
        view.invalidate_name(node)
        return
    _show_renamed(view, node, target, known)


def _show_renamed(view: View, node: Node, target: Name, known: Node | None) -> None:
    view.drafts.persistence.rename_snapshot(node)
    view.drafts.persistence.renamed_over(node)
    if known is not None:
        if known.draft is not None:
            view.drafts.persistence.drop_snapshot(known.draft, behind=True)
        view.gone(known)  # only now: in the log the new holder of the name comes before the end of the former
    if node.directory:
        view.names.unlearn(node)
    elif node.info is not None:
        view.nodes.set_object(node, node.info.renamed(target))


def _rename_sealed(view: View, node: Node, target: Name, show: Callable[[], None]) -> None:
    """Rename in the store, which other doors see, and `show` it."""
    source = view.nodes.name(node)
    if node.draft is not None:
        view.remove_sealed(source)
        show()
    else:
        view.rename_sealed(source, Name(target.bucket, target.key + b"/" * node.directory), show)


def _check_replaceable(view: View, node: Node, known: Node, *, replace: bool) -> None:
    name = known.component.decode(errors="replace")
    if not replace:
        raise Exists(f"{name} exists")
    if known.directory and not node.directory:
        raise IsDirectory(f"{name} is a directory")
    if node.directory and not known.directory:
        raise NotDirectory(f"{name} is a file")
    if known.directory and view.nodes.has_drafts_below(known):
        raise NotEmpty(f"files below {name} are being written")
