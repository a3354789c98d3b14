--[[
The prefix index: which engines have which prefix in their KV cache, as far as they have told.

KEYS   names of one family, so of one hash tag.  Each is a hash: epoch -> when it was last seen there, in ms.
ARGV   operation, how long a sighting counts (ms); then

Operations
  match   ARGV: epochs.  KEYS: a chain, from its beginning.
          -> for each epoch, how many names it has before the first that it has not
  note    ARGV: for each name an epoch, and 1: it is there; 0: it is not any more            -> nothing

An epoch is one life of one engine.  Nobody asks for one that has ended, so its sightings need not be searched for and
removed: they make room, oldest first, where a name has more than EPOCHS_MAX, and go with their key.
]]

local EPOCHS_MAX = 32

local function text(number)
  return string.format('%.0f', number)
end

local ttl_ms = tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

local function match()
  local epochs, counts, lost = {}, {}, {}
  for number = 3, #ARGV do
    epochs[#epochs + 1] = ARGV[number]
    counts[#counts + 1] = 0
  end
  for place, key in ipairs(KEYS) do
    local seen_ms, any = redis.call('HMGET', key, unpack(epochs)), false
    for number = 1, #epochs do
      if not lost[number] and seen_ms[number] and tonumber(seen_ms[number]) > now_ms - ttl_ms then
        counts[number] = place
        any = true
      else
        lost[number] = true
      end
    end
    if not any then
      break
    end
  end
  for number, count in ipairs(counts) do
    counts[number] = text(count)
  end
  return counts
end

local function forget_oldest(key)
  local all, oldest, oldest_ms = redis.call('HGETALL', key), '', math.huge
  for number = 1, #all, 2 do
    local seen_ms = tonumber(all[number + 1])
    if seen_ms < oldest_ms or (seen_ms == oldest_ms and all[number] < oldest) then
      oldest, oldest_ms = all[number], seen_ms
    end
  end
  redis.call('HDEL', key, oldest)
end

local function note()
  for number, key in ipairs(KEYS) do
    local epoch = ARGV[1 + 2 * number]
    if ARGV[2 + 2 * number] == '1' then
      redis.call('HSET', key, epoch, text(now_ms))
      if redis.call('HLEN', key) > EPOCHS_MAX then
        forget_oldest(key)
      end
      redis.call('PEXPIRE', key, text(ttl_ms))
    else
      redis.call('HDEL', key, epoch)
    end
  end
  return {}
end

local operations = { match = match, note = note }
return operations[ARGV[1]]()
