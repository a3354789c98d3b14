--[[
Which requests are suspected of the deaths of engines, for all gateways.

KEYS   how many deaths each is suspected of: a hash; until when each is remembered: a sorted set, in ms.  One hash tag.
ARGV   operation, how long a suspicion counts (ms), most names kept; then names, each once

Operations
  suspect   one death more for each of these        -> nothing
  convict   so many deaths for each: the last of ARGV is that number, and no name                 -> nothing
  acquit    none of these has done it               -> nothing
  known     -> name, deaths, name, deaths ...
]]

local function text(number)
  return string.format('%.0f', number)
end

local deaths, until_ms = KEYS[1], KEYS[2]
local operation, ttl_ms, names_max = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function forget(name)
  redis.call('HDEL', deaths, name)
  redis.call('ZREM', until_ms, name)
end

local function remember(name)
  redis.call('ZADD', until_ms, text(now_ms + ttl_ms), name)
  redis.call('PEXPIRE', deaths, text(ttl_ms))
  redis.call('PEXPIRE', until_ms, text(ttl_ms))
end

for _, name in ipairs(redis.call('ZRANGEBYSCORE', until_ms, '-inf', text(now_ms))) do
  forget(name)
end
if operation == 'known' then
  return redis.call('HGETALL', deaths)
end
local last = operation == 'convict' and #ARGV - 1 or #ARGV
for number = 4, last do
  local name = ARGV[number]
  if operation == 'acquit' then
    forget(name)
  else
    if operation == 'convict' then
      redis.call('HSET', deaths, name, ARGV[#ARGV])
    else
      redis.call('HINCRBY', deaths, name, 1)
    end
    remember(name)
  end
end
local excess = redis.call('ZCARD', until_ms) - names_max
if excess > 0 then
  for _, name in ipairs(redis.call('ZRANGE', until_ms, 0, text(excess - 1))) do
    forget(name)
  end
end
return {}
