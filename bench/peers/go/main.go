// A worker of `make bench-peers` on a lock library for Go. See bench/peers/README.md.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// answer is the output line for one input line. Its times are those of the machine's monotonic clock, in ns.
type answer struct {
	ID      uint64 `json:"id"`
	Started int64  `json:"started"`
	Ended   int64  `json:"ended"`
	OK      any    `json:"ok"`
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("usage: redlatch-bench-peers-go LIBRARY URL INTERVAL_MS")
	}
	library, ok := libraries[os.Args[1]]
	if !ok {
		log.Fatal("unknown library ", os.Args[1])
	}
	interval, err := strconv.Atoi(os.Args[3])
	check(err)
	acquire, err := library.connect(os.Args[2], time.Duration(interval)*time.Millisecond)
	check(err)
	write(map[string]string{"ready": os.Args[1] + " " + version(library.module)})

	var release func() error
	for line := range input() {
		words := strings.Fields(line)
		if len(words) != 7 && !(len(words) == 5 && words[2] == "unlock") {
			log.Fatal("unknown command ", words)
		}
		id, err := strconv.ParseUint(words[0], 10, 64)
		check(err)
		result := answer{ID: id, OK: true, Started: now()}
		switch words[2] {
		case "lock":
			release, err = acquire(words[4])
			check(err)
		case "unlock":
			check(release())
		case "pairs", "contend":
			result.OK = pairs(acquire, words)
		default:
			log.Fatal("unknown command ", words)
		}
		result.Ended = now()
		write(result)
	}
}

// input returns the lines of standard input. The process ends with it, also while a goroutine waits for a lock.
func input() <-chan string {
	lines := make(chan string)
	go func() {
		for input := bufio.NewScanner(os.Stdin); input.Scan(); {
			lines <- input.Text()
		}
		os.Exit(0)
	}()
	return lines
}

// pairs acquires and releases in many goroutines, each with a lock of its own or all with the same. It returns the
// number of pairs of each goroutine.
func pairs(acquire acquire, words []string) []int {
	tasks, err := strconv.Atoi(words[5])
	check(err)
	ms, err := strconv.Atoi(words[6])
	check(err)
	end := time.Now().Add(time.Duration(ms) * time.Millisecond)
	counts := make([]int, tasks)
	var running sync.WaitGroup
	for task := range counts {
		name := words[4]
		if words[2] == "pairs" {
			name += strconv.Itoa(task)
		}
		running.Go(func() {
			for time.Now().Before(end) {
				release, err := acquire(name)
				check(err)
				check(release())
				counts[task]++
			}
		})
	}
	running.Wait()
	return counts
}

// version returns the version of a module that this program was built with.
func version(module string) string {
	info, _ := debug.ReadBuildInfo()
	for _, dependency := range info.Deps {
		if dependency.Path == module {
			return dependency.Version
		}
	}
	return ""
}

func now() int64 {
	var now unix.Timespec
	check(unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	return now.Nano()
}

func write(line any) {
	text, err := json.Marshal(line)
	check(err)
	fmt.Println(string(text))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
