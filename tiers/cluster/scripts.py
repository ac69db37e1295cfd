"""The directory's steps, each one script that the server runs without another in between.

Responsibility: Lua text alone; arguments and answers are those of `tiers.cluster.membership` and
`tiers.cluster.location_format`.

Invariants:
- A machine's lease is one key with a time to live. Who writes locations proves its epoch in the same step.
- One epoch of a store holds the lease, at one address; with members epochs only rise, and outlive leases.
- A machine's number is the same again wherever it can be after all was lost: others may not have heard yet.
- The keys of a script begin with its one key argument, the prefix of a part. On a Redis Cluster a prefix has a tag in
  braces, so that they are all on one server; members are with the first part, and each machine lends its lease to the
  others.

Concurrency: pure values.
"""

from __future__ import annotations

from typing import Final

from kvfs.limits import MAX_DIRECTORY_HOLDERS

PREFIX: Final = b"kvfs:"
"""Of the only part of a directory on one server."""

_MEMBERS: Final = """
local prefix = KEYS[1]
local function members(into)
  for _, id in ipairs(redis.call('SMEMBERS', prefix .. 'live')) do
    local row = redis.call('HMGET', prefix .. 'node:' .. id, 'number', 'epoch', 'address', 'report')
    if row[1] then
      into[#into + 1] = {id, row[1], row[2], row[3], row[4]}
    else
      redis.call('SREM', prefix .. 'live', id)
    end
  end
  return into
end
"""

MEMBERS: Final = _MEMBERS + "return members({'kept', '', ''})"
"""Answers as BEAT does, for a machine that only reads."""

BEAT: Final = (
    _MEMBERS
    + """
local id, epoch, address, report, lease_ms, most = unpack(ARGV)
local lease = prefix .. 'node:' .. id
local held = redis.call('HMGET', lease, 'epoch', 'address', 'number', 'rival')
local number, kept = held[3], held[1] == epoch and held[2] == address
if not kept then
  if held[1] and held[2] ~= address then
    redis.call('HSET', lease, 'rival', address)
    return members({'double', held[2], ''})
  end
  local last = redis.call('HGET', prefix .. 'epochs', id)
  if last and tonumber(last) > tonumber(epoch) then return members({'old', last, ''}) end
  local others = members({})
  for _, other in ipairs(others) do
    if other[1] ~= id and other[4] == address then return members({'address', address, ''}) end
  end
  local numbers = redis.call('HLEN', prefix .. 'numbers')
  number = redis.call('HGET', prefix .. 'numbers', id)
  if #others >= tonumber(most) and not held[1] or not number and numbers >= 65535 then
    return members({'full', tostring(#others), ''})
  end
  if not number then
    local taken, at = {}, (id:byte(1) * 256 + id:byte(2)) % 65535
    for _, each in ipairs(redis.call('HVALS', prefix .. 'numbers')) do taken[each] = true end
    repeat
      at = at % 65535 + 1
      number = string.char(math.floor(at / 256), at % 256)
    until not taken[number]
    redis.call('HSET', prefix .. 'numbers', id, number)
  end
  redis.call('HSET', prefix .. 'epochs', id, epoch)
  redis.call('HSET', lease, 'epoch', epoch, 'address', address, 'number', number)
end
redis.call('SADD', prefix .. 'live', id)
redis.call('HSET', lease, 'report', report)
redis.call('HDEL', lease, 'rival')
redis.call('PEXPIRE', lease, lease_ms)
return members({kept and 'kept' or 'joined', number, held[4] or ''})
"""
)
"""Take the lease or extend it; answer the standing, the machine's number, who else asked for its lease, and members, as
also where it is refused."""

LEND: Final = """
local prefix, id, epoch = KEYS[1], ARGV[1], ARGV[2]
local lease = prefix .. 'node:' .. id
local held = redis.call('HMGET', lease, 'epoch', 'number')
if held[1] and tonumber(held[1]) > tonumber(epoch) then return -1 end
redis.call('HSET', lease, 'epoch', epoch, 'number', ARGV[3])
redis.call('PEXPIRE', lease, ARGV[4])
redis.call('SADD', prefix .. 'live', id)
return held[1] == epoch and held[2] == ARGV[3] and 0 or 1
"""
"""Take or extend a lease at a part without members: 1 where it or its number is new, 0 where not, -1 where a later
epoch has it."""

RELEASE: Final = """
local lease = KEYS[1] .. 'node:' .. ARGV[1]
if redis.call('HGET', lease, 'epoch') ~= ARGV[2] then return 0 end
redis.call('SREM', KEYS[1] .. 'live', ARGV[1])
return redis.call('DEL', lease)
"""

LOOKUP: Final = """
local places, out, call, sub, hash = ARGV[1], {}, redis.call, string.sub, KEYS[1] .. 'b:'
for i = 1, #places, 10 do
  out[#out + 1] = call('HGET', hash .. sub(places, i, i + 1), sub(places, i + 2, i + 9)) or ''
end
return out
"""
"""Answer the numbers of each block's holders. Joined to one text they took 80 us longer for 64 blocks."""

_EDIT: Final = f"""
local prefix = KEYS[1]
local row = redis.call('HMGET', prefix .. 'node:' .. ARGV[1], 'epoch', 'number')
if row[1] ~= ARGV[2] then return -1 end
local own = row[2]
local function edit(key, field, before, after)
  if after == before then return end
  if after == '' then redis.call('HDEL', key, field) return end
  redis.call('HSET', key, field, after:sub(-{2 * MAX_DIRECTORY_HOLDERS}))
end
"""

CHANGE: Final = (
    _EDIT
    + """
local changes = ARGV[3]
for i = 1, #changes, 11 do
  local key, field = prefix .. 'b:' .. changes:sub(i, i + 1), changes:sub(i + 2, i + 9)
  local before, after = redis.call('HGET', key, field) or '', ''
  for j = 1, #before, 2 do
    local number = before:sub(j, j + 1)
    if number ~= own then after = after .. number end
  end
  if changes:sub(i + 10, i + 10) == '+' then after = after .. own end
  edit(key, field, before, after)
end
return 0
"""
)
"""Note which blocks this machine holds and which it does not; -1 without the lease."""

MANIFEST: Final = (
    _EDIT
    + """
local places, held, live, entries = ARGV[5], {}, {}, 0
for _, id in ipairs(redis.call('SMEMBERS', prefix .. 'live')) do
  live[redis.call('HGET', prefix .. 'node:' .. id, 'number') or ''] = true
end
for i = 1, #places, 10 do
  local bucket = places:sub(i, i + 1)
  held[bucket] = held[bucket] or {}
  held[bucket][places:sub(i + 2, i + 9)] = true
end
for at = tonumber(ARGV[3]), tonumber(ARGV[3]) + tonumber(ARGV[4]) - 1 do
  local bucket = string.char(math.floor(at / 256), at % 256)
  local key, mine = prefix .. 'b:' .. bucket, held[bucket] or {}
  local all = redis.call('HGETALL', key)
  for i = 1, #all, 2 do
    local field, before, after = all[i], all[i + 1], ''
    for j = 1, #before, 2 do
      local number = before:sub(j, j + 1)
      if number ~= own and live[number] or number == own and mine[field] then
        after = after .. number
        if number == own then mine[field] = nil end
      end
    end
    if mine[field] then after = after .. own end
    mine[field] = nil
    edit(key, field, before, after)
  end
  entries = entries + #all / 2
  for field in pairs(mine) do
    redis.call('HSET', key, field, own)
    entries = entries + 1
  end
end
return entries
"""
)
"""Make some hashes say of this machine what its manifest says, and nothing of machines without a lease; answer how many
blocks were looked at, -1 without the lease."""

ALL: Final = (MEMBERS, BEAT, LEND, RELEASE, LOOKUP, CHANGE, MANIFEST)
