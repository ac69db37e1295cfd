"""The kernel's side of the mount: nodes, attributes, errnos, backing files."""
