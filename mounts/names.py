"""Making, removing and renaming names on the mount: one function a system call, over the view.

Responsibility: the steps and their order; errors leave as `kvfs.errors`. Both ways in use them: calls from
the native loop (mounts.calls) and pyfuse3's handlers (mounts.operations).

Concurrency: the service's trio thread; each is one step.
"""

from __future__ import annotations

import logging
import stat

from kvfs.errors import CrossDevice, Exists, InvalidRequest, IsDirectory, KvfsError, NotDirectory, NotEmpty
from mounts.nodes import Node
from mounts.view import View
from tiers.model import Attributes, Name, ObjectInfo

log = logging.getLogger("kvfs.mount")

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
"""Flags of renameat2(2)."""


def make_directory(view: View, parent: Node, component: bytes, *, mode: int, uid: int, gid: int) -> Node:
    """mkdir(2); on the mount's root it makes a bucket."""
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
    view.know_names(node, ())
    return node


def remove_directory(view: View, parent: Node, component: bytes) -> None:
    """rmdir(2)."""
    node = view.need(parent, component)
    if not node.directory:
        raise NotDirectory(f"{component.decode(errors='replace')} is a file")
    if view.nodes.has_drafts_below(node):
        raise NotEmpty(f"files below {component.decode(errors='replace')} are being written")
    with view.own_change():
        if parent.parent is None:
            view.store.remove_bucket(component)
        else:
            view.store.remove_directory(view.nodes.name(node))
            view.keep_above(view.nodes.name(node))
    view.touch(parent)
    view.gone(node)


def remove_file(view: View, parent: Node, component: bytes) -> None:
    """unlink(2)."""
    node = view.need(parent, component)
    if node.directory:
        raise IsDirectory(f"{component.decode(errors='replace')} is a directory")
    view.remove_sealed(view.nodes.name(node))
    view.touch(parent)
    view.gone(node)
    if node.draft is not None:
        view.drafts.forget_snapshot(node.draft)


def rename(view: View, above: Node, component: bytes, below: Node, new_component: bytes, flags: int) -> None:
    """renameat2(2). A draft moves with its name; other doors see what it replaces until it is published."""
    if flags & RENAME_EXCHANGE:
        raise InvalidRequest("RENAME_EXCHANGE: two names cannot be exchanged in one step here")
    node = view.need(above, component)
    if above.parent is None or (below.parent is None and node.directory):
        raise CrossDevice("a bucket is not renamed, and a directory becomes one by copying")
    target = view.place(below, new_component)
    known = view.find(below, new_component)
    if known is node:
        return
    if known is not None:
        _check_replaceable(view, node, known, replace=not flags & RENAME_NOREPLACE)
    _rename_sealed(view, node, target)
    if known is not None:
        view.nodes.unlink(known, doubt=known.directory)
    view.nodes.move(node, below, new_component)
    view.touch(above)
    view.touch(below)
    _show_renamed(view, node, target, known)


def draft_to_settle(view: View, above: Node, component: bytes, below: Node) -> Node | None:
    """The file that a rename moves, where its new bucket promises that a name's bytes are on the device and these are
    not: `DraftKeeper.persist` comes first."""
    node = view.nodes.child(above, component)
    if node is None or node.draft is None or below.parent is None:
        return None
    durable = view.store.bucket(view.nodes.name(below).bucket).durable
    return node if durable and not view.drafts.is_settled(node.draft) else None


def renamed(view: View, node: Node, above: Node, below: Node, new_component: bytes, when_ns: int) -> None:
    """The native loop has moved a draft to a free name: the tree follows, and what other doors see.

    Whatever happened meanwhile, the rename was first: a draft that was published before this is renamed as an
    object, and an object that another door put under the new name is what the draft will replace.
    """
    if not node.linked:
        view.backings.unlink(below.nodeid, new_component, node.nodeid)
        return
    target = view.nodes.child_name(below, new_component)
    known = view.nodes.child(below, new_component)
    try:
        with view.store.directory_times.still():
            _rename_sealed(view, node, target)
    except KvfsError as error:
        log.warning("%s cannot be renamed to %s: %s", view.nodes.name(node), target, error)
        view.backings.doubt(below.nodeid, new_component, node.nodeid)
        view.forget_name(node)
        return
    if known is not None:
        view.nodes.unlink(known, doubt=known.directory)
    view.nodes.move(node, below, new_component, mirrored=True)
    view.touch(above, when_ns)
    view.touch(below, when_ns)
    _show_renamed(view, node, target, known)


def _show_renamed(view: View, node: Node, target: Name, known: Node | None) -> None:
    view.drafts.rename_snapshot(node)
    view.drafts.renamed_over(node)
    if known is not None:
        if known.draft is not None:
            view.drafts.forget_snapshot(known.draft, behind=True)
        view.gone(known)  # now: in the log what has the name comes before the end of what had it
    if node.directory:
        view.unknow_names(node)
    elif node.info is not None:
        found = view.store.lookup(target)
        if isinstance(found, ObjectInfo):
            view.nodes.set_object(node, found)


def _rename_sealed(view: View, node: Node, target: Name) -> None:
    """What other doors see of the rename."""
    source = view.nodes.name(node)
    with view.own_change():
        if node.draft is not None:
            view.remove_sealed(source)
        elif node.directory:
            view.store.rename(source, Name(target.bucket, target.key + b"/"))
            view.keep_above(source)
        else:
            view.store.rename(source, target)
            view.keep_above(source)


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
