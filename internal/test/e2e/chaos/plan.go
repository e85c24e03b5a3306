package chaos

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// Step is one decision. Steps depend only on the seed and the number of drivers, not on their
// effects or the speed of the machine.
type Step struct {
	N      int           // its number, from 1
	At     time.Duration // since the beginning
	Act    string        // one of the actions
	Driver int           // which driver, where that matters
	A, B   int           // parameters from 0 to 999, whose meaning depends on the action
}

func (s Step) String() string {
	return fmt.Sprintf("#%d at %.2fs %s driver=%d a=%d b=%d", s.N, s.At.Seconds(), s.Act, s.Driver, s.A, s.B)
}

// choice is an action, its weight, and the action that ends it.
type choice struct {
	act    string
	weight int
	then   string        // the action that ends it; empty: none
	least  time.Duration // when that follows
	most   time.Duration
}

const ms = time.Millisecond

// choices are all that can happen.
var choices = []choice{
	{"driver restart", 30, "driver start", 0, 2000 * ms},
	{"driver stop", 15, "driver start", 500 * ms, 12 * time.Second},
	{"driver kill", 18, "driver start", 0, 6000 * ms},
	{"driver hang", 18, "driver unhang", 500 * ms, 6000 * ms},
	{"driver not ready", 15, "driver ready", 500 * ms, 6000 * ms},
	{"driver lie", 12, "driver truth", 1000 * ms, 6000 * ms},
	{"driver change", 15, "", 0, 0},
	{"driver move topology", 9, "driver truth", 1000 * ms, 8000 * ms},
	{"driver directory", 9, "driver start", 0, 4000 * ms},
	{"driver hangs at start", 12, "driver replace", 0, 3000 * ms},

	{"file system hang", 5, "file system answer", 500 * ms, 9000 * ms},
	{"manager slow", 6, "", 0, 0},
	{"manager stop", 5, "daemon again", 300 * ms, 4000 * ms},

	{"kubelet stop", 6, "kubelet start", 200 * ms, 6000 * ms},
	{"kubelet restart", 6, "", 0, 0},

	{"daemon kill", 7, "daemon start", 0, 1500 * ms},
	{"daemon restart", 5, "daemon start", 0, 1000 * ms},
	{"daemon hang up", 6, "", 0, 0},
	{"daemon reload", 6, "", 0, 0},
	{"daemon reregister", 6, "", 0, 0},
	{"daemon freeze", 4, "daemon thaw", 50 * ms, 3000 * ms},

	{"socket remove", 12, "", 0, 0},
	{"socket move within", 6, "", 0, 0},
	{"socket move out", 6, "", 0, 0},
	{"socket to file", 9, "socket leave", 500 * ms, 6000 * ms},
	{"socket to directory", 6, "socket leave", 500 * ms, 6000 * ms},
	{"socket to link", 6, "socket leave", 500 * ms, 6000 * ms},
	{"socket to mute", 6, "socket leave", 500 * ms, 6000 * ms},
	{"socket to sidecar", 9, "socket leave", 500 * ms, 6000 * ms},
	{"socket other", 9, "other leave", 500 * ms, 9000 * ms},
	{"bystander", 6, "", 0, 0},
	{"registry remove", 1, "kubelet restart", 500 * ms, 5000 * ms},
	{"registry move away", 1, "kubelet restart", 500 * ms, 5000 * ms},

	{"config remove", 12, "config restore", 300 * ms, 14 * time.Second},
	{"config break", 9, "config fix", 500 * ms, 6000 * ms},
	{"config endpoint", 9, "", 0, 0},
	{"config disable", 12, "config enable", 500 * ms, 6000 * ms},
	{"config withdraw", 6, "", 0, 0},
}

// pause is the longest time between two decisions, not counting those that end an action.
const pause = 300 * ms

// Plan is the sequence of decisions.
type Plan struct {
	rand    *rand.Rand
	drivers int
	n       int
	at      time.Duration
	later   []Step // steps that end others, by time
	next    Step   // drawn, not returned yet
}

// NewPlan returns the plan of a seed.
func NewPlan(seed uint64, drivers int) *Plan {
	p := &Plan{rand: rand.New(rand.NewPCG(seed, 0)), drivers: drivers}
	p.draw()
	return p
}

// Next returns the next decision in the order of time.
func (p *Plan) Next() Step {
	s := p.next
	if len(p.later) > 0 && p.later[0].At <= s.At {
		s = p.later[0]
		p.later = p.later[1:]
	} else {
		p.draw()
	}
	p.n++
	s.N = p.n
	return s
}

// draw adds an action, and the action that ends it.
func (p *Plan) draw() {
	p.at += time.Duration(p.rand.Int64N(int64(pause)))
	total := 0
	for _, c := range choices {
		total += c.weight
	}
	k := p.rand.IntN(total)
	i := 0
	for k >= choices[i].weight {
		k -= choices[i].weight
		i++
	}
	c := choices[i]
	p.next = Step{At: p.at, Act: c.act, Driver: p.rand.IntN(p.drivers), A: p.rand.IntN(1000), B: p.rand.IntN(1000)}
	after := p.rand.Float64()
	if c.then == "" {
		return
	}
	end := Step{At: p.at + c.least + time.Duration(after*float64(c.most-c.least)), Act: c.then, Driver: p.next.Driver, A: p.next.A, B: p.next.B}
	// After steps of the same time, so never before the action itself.
	end.At = max(end.At, p.at+1)
	at, _ := slices.BinarySearchFunc(p.later, end, func(have, want Step) int {
		return cmp.Or(cmp.Compare(have.At, want.At), -1)
	})
	p.later = slices.Insert(p.later, at, end)
}
