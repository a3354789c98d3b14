--[[
How many gateway processes share these limits: each says every few seconds that it is there, and learns of the others.

KEYS   the set of them, with the time until which each counts
ARGV   its id, how long it counts (us); 0: it leaves
       -> how many there are, how many of them have an id before its own
]]

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local id, counts_us = ARGV[1], tonumber(ARGV[2])

local function text(number)
  return string.format('%.0f', number)
end

redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', text(now))
if counts_us == 0 then
  redis.call('ZREM', KEYS[1], id)
else
  redis.call('ZADD', KEYS[1], text(now + counts_us), id)
  redis.call('PEXPIRE', KEYS[1], text(math.ceil(counts_us / 1000)))
end
local count, before = 0, 0
for _, other in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  count = count + 1
  if other < id then
    before = before + 1
  end
end
return { text(count), text(before) }
