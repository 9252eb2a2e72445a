package main

import (
	"context"
	"math"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
)

const lease = 30 * time.Second

// acquire waits until the lock of this name is acquired, and returns how to release it.
type acquire func(name string) (release func() error, err error)

// libraries has each library with its default settings, except the lease and the interval at which it polls.
var libraries = map[string]struct {
	module  string
	connect func(url string, interval time.Duration) (acquire, error)
}{
	"redsync":       {"github.com/go-redsync/redsync/v4", connectRedsync},
	"bsm/redislock": {"github.com/bsm/redislock", connectRedislock},
	"rueidislock":   {"github.com/redis/rueidis", connectRueidislock},
}

func connectRedsync(url string, interval time.Duration) (acquire, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	locks := redsync.New(goredis.NewPool(redis.NewClient(options)))
	return func(name string) (func() error, error) {
		mutex := locks.NewMutex(name, redsync.WithExpiry(lease), redsync.WithRetryDelay(interval),
			redsync.WithTries(math.MaxInt))
		err := mutex.Lock()
		return func() error { _, err := mutex.Unlock(); return err }, err
	}, nil
}

func connectRedislock(url string, interval time.Duration) (acquire, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	locks := redislock.New(redis.NewClient(options))
	polling := &redislock.Options{RetryStrategy: redislock.LinearBackoff(interval)}
	ctx := context.Background()
	return func(name string) (func() error, error) {
		lock, err := locks.Obtain(ctx, name, lease, polling)
		return func() error { return lock.Release(ctx) }, err
	}, nil
}

// The longest wait for a message. Some messages are lost: version 1.0.79 then waits although the lock is free.
const rueidislockWait = 100 * time.Millisecond

// Its documentation recommends KeyMajority and NoLoopTracking for a single server of version 7.0.5 or later.
func connectRueidislock(url string, _ time.Duration) (acquire, error) {
	options, err := rueidis.ParseURL(url)
	if err != nil {
		return nil, err
	}
	locks, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: options, KeyValidity: lease, KeyMajority: 1, NoLoopTracking: true,
	})
	return func(name string) (func() error, error) {
		for {
			// A deadline would also shorten the lease.
			ctx, stop := context.WithCancel(context.Background())
			limit := time.AfterFunc(rueidislockWait, stop)
			_, cancel, err := locks.WithContext(ctx, name)
			inTime := limit.Stop()
			switch {
			case err == nil && inTime:
				return func() error { cancel(); stop(); return nil }, nil
			case err == nil:
				cancel()
			case inTime:
				stop()
				return nil, err
			}
		}
	}, err
}
