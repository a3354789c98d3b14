--[[
API keys, their tenants and organisations: each a JSON text in one of three hashes, all in one slot.

KEYS   organisations, tenants, keys, audit
ARGV   operation, then

  lookup  id                                          -> key, its tenant, its organisation; '' for what is not there
  get     hash, id                                    -> record or ''
  put     hash, id, expected, record, records_max, audit_max, audit, then hash, id, record for each parent to be made
          where it is missing                         -> 1 | 0 (it is not as expected) | full
  count   hash                                        -> number
  list    hash, cursor                                -> cursor, records ...
  audit   lines                                       -> lines ..., newest first

`put` writes what was expected or nothing, and its audit line with it.
]]

local hashes = { organisations = KEYS[1], tenants = KEYS[2], keys = KEYS[3] }
local audit = KEYS[4]
local SCAN = 500

local function get(hash, id)
  return redis.call('HGET', hash, id) or ''
end

local function lookup()
  local key = get(hashes.keys, ARGV[2])
  if key == '' then
    return { '', '', '' }
  end
  local tenant = get(hashes.tenants, cjson.decode(key).key.tenant)
  if tenant == '' then
    return { key, '', '' }
  end
  return { key, tenant, get(hashes.organisations, cjson.decode(tenant).organisation) }
end

local function put()
  local hash, id, expected = hashes[ARGV[2]], ARGV[3], ARGV[4]
  if get(hash, id) ~= expected then
    return { '0' }
  elseif expected == '' and redis.call('HLEN', hash) >= tonumber(ARGV[6]) then
    return { 'full' }
  end
  redis.call('HSET', hash, id, ARGV[5])
  for first = 9, #ARGV, 3 do
    redis.call('HSETNX', hashes[ARGV[first]], ARGV[first + 1], ARGV[first + 2])
  end
  redis.call('XADD', audit, 'MAXLEN', '~', ARGV[7], '*', 'line', ARGV[8])
  return { '1' }
end

local function list()
  local page = redis.call('HSCAN', hashes[ARGV[2]], ARGV[3], 'COUNT', SCAN)
  local reply = { page[1] }
  for index = 2, #page[2], 2 do
    reply[#reply + 1] = page[2][index]
  end
  return reply
end

local function lines()
  local reply = {}
  for index, entry in ipairs(redis.call('XREVRANGE', audit, '+', '-', 'COUNT', ARGV[2])) do
    reply[index] = entry[2][2]
  end
  return reply
end

local operations = {
  lookup = lookup,
  get = function()
    return { get(hashes[ARGV[2]], ARGV[3]) }
  end,
  put = put,
  count = function()
    return { string.format('%.0f', redis.call('HLEN', hashes[ARGV[2]])) }
  end,
  list = list,
  audit = lines,
}
return operations[ARGV[1]]()
