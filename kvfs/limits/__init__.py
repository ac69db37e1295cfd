"""Every named limit of kvfs, each with its reason.

Responsibility: the only place where a bound is written. Configuration may lower some, and raises none. Callers read
`kvfs.limits`, not the modules in it.
"""

from kvfs.limits.doors import *
from kvfs.limits.http import *
from kvfs.limits.scheduling import *
from kvfs.limits.store import *
from kvfs.limits.units import *
