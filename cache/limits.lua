--[[
The limit book: one call admits a request against all limits of all its levels (organisation, tenant, key), or none.

KEYS   for each level its state and its leases; last, the reservation.  All of one hash tag.
ARGV   operation, lease (us), tokens, micros; then for each level requests/min, tokens/min, concurrent, micros/day, where
       -1 is no limit: those of the reservation, also in the calls that come after it.

Operations
  reserve   charge 1 request, `tokens` and `micros` to each level and take a lease; a refusal writes nothing
            -> 1, now, 0, '', 0, figures ...              admitted
            -> 0, now, level, limit, wait, figures ...    refused; the limit that takes longest; wait (us) -1: never
            -> void                                       it has been given back already
  renew     keep the leases for another while                        -> 1 | 0 (nobody knows the reservation)
  settle    put the real `tokens` and `micros` in place of what was reserved, once        -> 1 | 0 (nobody knows it)
  refund    give all of it back, the request too                                          -> 1 | 0 (nobody knows it)
  void      the same for one whose answer never came: if it is not there yet, it never will be       -> 1
  figures   of a level, in one string: requests left, us until all are, tokens left, us until all are; -1 without a limit

A level's state is one string: `at requests part tokens part day spent`, and the `requests/min tokens/min` that it was last
charged under.  A bucket holds at most a minute's worth and gains limit/60e6 a microsecond; `part` counts the fraction in
units of 1/60e6, so nothing is ever rounded.  A bucket that nobody has touched is full, and its key expires once it is.
What was used beyond a reservation makes a bucket negative: a debt.  Limits may change between a reservation and its end,
so who settles lets time pass under the limits in the state, and corrects only what its own have charged.

Numbers are doubles, exact up to 2^53.  No limit or level is beyond 1e15, no product here beyond 4e15 where it must be
exact, and all go out through %.0f: tostring(1e15) is '1e+15', and a number as a reply is truncated.
]]

local MINUTE = 60000000
local DAY = 86400000000
local MOST = 1e15
local RESERVATION_TTL_MS = 900000
local STATE_TTL_MS_MAX = 2592000000 -- a debt of more than 30 days is forgiven
local MARGIN_MS = 60000
local SLOT_WAIT_US_MAX = 1000000 -- streams end sooner than leases: look again after a second
local VOID = 'void'
local STATE = '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$'

local function text(number)
  return string.format('%.0f', number)
end

local function now_us()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000000 + tonumber(time[2])
end

-- What a bucket holds after `elapsed` us.
local function refill(held, part, limit, elapsed)
  if limit < 0 then
    return MOST, 0
  end
  local minutes = math.floor(elapsed / MINUTE)
  local rest = elapsed - minutes * MINUTE
  local whole = math.floor(limit / MINUTE)
  local units = part + rest * (limit - whole * MINUTE)
  local gained = math.floor(units / MINUTE)
  held = held + minutes * limit + rest * whole + gained
  if held >= limit then
    return limit, 0
  end
  return held, units - gained * MINUTE
end

-- Until a bucket holds `wanted`; -1: it never will.
local function wait_us(held, part, limit, wanted)
  if wanted <= held then
    return 0
  elseif wanted > limit or limit == 0 then
    return -1
  end
  local missing = wanted - held
  local minutes = math.floor(missing / limit)
  local rest = missing - minutes * limit
  local us = math.ceil((rest * MINUTE - part) / limit)
  if rest * MINUTE > 9e15 then
    us = us + 1 -- the product was rounded: rather late than early
  end
  return minutes * MINUTE + us
end

local now = now_us()
local lease_us, tokens, micros = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local levels_count = (#KEYS - 1) / 2
local reservation = KEYS[#KEYS]

-- One level as it is now: its limits, its buckets, and what it has spent today.  When a request ends, time has passed
-- under the limits of who came last.  A state that cannot be read is none.
local function load(number, ending)
  local first = 5 + (number - 1) * 4
  local level = {
    state = KEYS[number * 2 - 1],
    leases = KEYS[number * 2],
    requests_limit = tonumber(ARGV[first]),
    tokens_limit = tonumber(ARGV[first + 1]),
    concurrent = tonumber(ARGV[first + 2]),
    micros_limit = tonumber(ARGV[first + 3]),
    requests = MOST,
    requests_part = 0,
    tokens = MOST,
    tokens_part = 0,
    day = math.floor(now / DAY),
    spent = 0,
    known = false,
  }
  level.charges_requests, level.charges_tokens = level.requests_limit >= 0, level.tokens_limit >= 0
  level.charges = level.charges_requests or level.charges_tokens or level.micros_limit >= 0
  if not level.charges then
    return level
  end
  local elapsed = 0
  local held = redis.call('GET', level.state) or ''
  local at, requests, requests_part, level_tokens, tokens_part, day, spent, rpm, tpm = string.match(held, STATE)
  if at then
    level.known = true
    elapsed = math.max(0, now - tonumber(at)) -- a clock that was set back gives nothing, and takes nothing
    level.requests, level.requests_part = tonumber(requests), tonumber(requests_part)
    level.tokens, level.tokens_part = tonumber(level_tokens), tonumber(tokens_part)
    if tonumber(day) == level.day then
      level.spent = tonumber(spent)
    end
    if ending then
      level.requests_limit, level.tokens_limit = tonumber(rpm), tonumber(tpm)
    end
  end
  level.requests, level.requests_part = refill(level.requests, level.requests_part, level.requests_limit, elapsed)
  level.tokens, level.tokens_part = refill(level.tokens, level.tokens_part, level.tokens_limit, elapsed)
  return level
end

local function until_full(level)
  local requests, tokens_us = -1, -1
  if level.requests_limit >= 0 then
    requests = wait_us(level.requests, level.requests_part, level.requests_limit, level.requests_limit)
  end
  if level.tokens_limit >= 0 then
    tokens_us = wait_us(level.tokens, level.tokens_part, level.tokens_limit, level.tokens_limit)
  end
  return requests, tokens_us
end

local function save(level)
  local requests_us, tokens_us = until_full(level)
  local keep_us = math.max(requests_us, tokens_us, 0)
  if level.spent > 0 then
    keep_us = math.max(keep_us, (level.day + 1) * DAY - now)
  end
  local ttl_ms = math.min(math.ceil(keep_us / 1000) + MARGIN_MS, STATE_TTL_MS_MAX)
  local state = string.format(
    '%.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f %.0f',
    now,
    level.requests,
    level.requests_part,
    level.tokens,
    level.tokens_part,
    level.day,
    level.spent,
    level.requests_limit,
    level.tokens_limit
  )
  redis.call('SET', level.state, state, 'PX', text(ttl_ms))
end

local function with_figures(reply, levels)
  for _, level in ipairs(levels) do
    local requests_us, tokens_us = until_full(level)
    local requests = level.requests_limit >= 0 and math.max(0, level.requests) or -1
    local left = level.tokens_limit >= 0 and math.max(0, level.tokens) or -1
    reply[#reply + 1] = string.format('%.0f %.0f %.0f %.0f', requests, requests_us, left, tokens_us)
  end
  return reply
end

-- Until a slot is free: 0, or -1 where there is none at all.
local function slot_wait_us(level)
  if level.concurrent < 0 then
    return 0
  elseif level.concurrent == 0 then
    return -1
  end
  local after = '(' .. text(now)
  if redis.call('ZCOUNT', level.leases, after, '+inf') < level.concurrent then
    return 0
  end
  local first = redis.call('ZRANGEBYSCORE', level.leases, after, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
  return math.min(SLOT_WAIT_US_MAX, tonumber(first[2]) - now)
end

local function take_lease(leases, concurrent)
  if concurrent >= 0 then
    redis.call('ZREMRANGEBYSCORE', leases, '-inf', text(now))
    redis.call('ZADD', leases, text(now + lease_us), reservation)
    redis.call('PEXPIRE', leases, text(math.ceil(lease_us / 1000) + MARGIN_MS))
  end
end

local function spend_wait_us(level)
  if level.micros_limit < 0 or level.spent + micros <= level.micros_limit then
    return 0
  elseif micros > level.micros_limit then
    return -1
  end
  return (level.day + 1) * DAY - now
end

local function reserve()
  local levels, worst_us, at, limit = {}, 0, 0, ''
  local function weigh(us, number, name)
    if us ~= 0 and worst_us >= 0 and (us < 0 or us > worst_us) then
      worst_us, at, limit = us, number, name
    end
  end
  for number = 1, levels_count do
    local level = load(number, false)
    levels[number] = level
    if level.charges_requests then
      weigh(wait_us(level.requests, level.requests_part, level.requests_limit, 1), number, 'requests')
    end
    if level.charges_tokens then
      weigh(wait_us(level.tokens, level.tokens_part, level.tokens_limit, tokens), number, 'tokens')
    end
    weigh(slot_wait_us(level), number, 'concurrent')
    weigh(spend_wait_us(level), number, 'spend')
  end
  if at > 0 then
    return with_figures({ '0', text(now), text(at), limit, text(worst_us) }, levels)
  end
  local held = string.format('%.0f %.0f %.0f', tokens, micros, math.floor(now / DAY))
  if not redis.call('SET', reservation, held, 'NX', 'PX', text(RESERVATION_TTL_MS)) then
    return { VOID }
  end
  for _, level in ipairs(levels) do
    if level.charges_requests then
      level.requests = level.requests - 1
    end
    if level.charges_tokens then
      level.tokens = level.tokens - tokens
    end
    level.spent = math.min(MOST, level.spent + micros)
    if level.charges then
      save(level)
    end
    take_lease(level.leases, level.concurrent)
  end
  return with_figures({ '1', text(now), '0', '', '0' }, levels)
end

-- A bucket with `back` more in it, which may be less.
local function give(held, part, limit, back)
  if limit < 0 then
    return held, part
  end
  held = held + back
  if held >= limit then
    return limit, 0
  elseif held < -MOST then
    return -MOST, 0
  end
  return held, part
end

local function settle(whole)
  local held = redis.call('GET', reservation)
  if not held or held == VOID then
    return { '0' }
  end
  if whole then
    tokens, micros = 0, 0
  end
  local tokens_held, micros_held, day = string.match(held, '^(%d+) (%d+) (%d+)$')
  for number = 1, levels_count do
    local level = load(number, true)
    if level.charges_tokens then
      level.tokens, level.tokens_part =
        give(level.tokens, level.tokens_part, level.tokens_limit, tonumber(tokens_held) - tokens)
    end
    if level.charges_requests and whole then
      level.requests, level.requests_part = give(level.requests, level.requests_part, level.requests_limit, 1)
    end
    if tonumber(day) == level.day then -- what yesterday's request cost is yesterday's
      level.spent = math.min(MOST, math.max(0, level.spent + micros - tonumber(micros_held)))
    end
    -- A bucket that nobody knows is full under limits that are not ours to say: what adds nothing to it is not written.
    if level.charges and (level.known or level.tokens < level.tokens_limit or level.spent > 0) then
      save(level)
    end
    if level.concurrent >= 0 then
      redis.call('ZREM', level.leases, reservation)
    end
  end
  redis.call('DEL', reservation)
  return { '1' }
end

local function renew()
  local held = redis.call('GET', reservation)
  if not held or held == VOID then
    return { '0' }
  end
  redis.call('PEXPIRE', reservation, text(RESERVATION_TTL_MS))
  for number = 1, levels_count do
    take_lease(KEYS[number * 2], tonumber(ARGV[5 + (number - 1) * 4 + 2]))
  end
  return { '1' }
end

local operations = {
  reserve = reserve,
  renew = renew,
  settle = function()
    return settle(false)
  end,
  refund = function()
    return settle(true)
  end,
  void = function()
    settle(true)
    redis.call('SET', reservation, VOID, 'PX', text(RESERVATION_TTL_MS)) -- its command may still be under way
    return { '1' }
  end,
}
return operations[ARGV[1]]()
