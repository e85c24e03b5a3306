package registrar

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
)

// situation is what decide depends on, with times in seconds. A time of 0 means never.
type situation struct {
	leaving, checkFailed, up, dirMissing, withdraw, registered bool
	// when_limit_changes = "leave"
	leave   bool
	adopted bool

	driver   status.DriverState
	place    status.Place
	request  bool
	identity string // what differs from what the kubelet was told: see identities
	settings string // likewise: see settingsChanges

	now, requestAt, lastPresent, notifiedAt, getInfoAt, publishedAt, returnedAt, identitySince int
}

const (
	withdrawAfterSeconds = 30
	askSeconds           = 5   // kubeletAsks
	retrySeconds         = 150 // kubeletRetries
)

var (
	driverStates    = []status.DriverState{status.Absent, status.Starting, status.Hanging, status.Ready, status.Mismatch}
	identities      = []string{"", "version", "node id", "volume limit", "topology key added", "topology value", "topology value and node id"}
	settingsChanges = []string{"", "endpoint", "versions"}
)

// inputs is the adapter: the situation as decide gets it.
func (s situation) inputs() (inputs, time.Time) {
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time {
		if seconds == 0 {
			return time.Time{}
		}
		return start.Add(time.Duration(seconds) * time.Second)
	}
	told := status.Announcement{
		Endpoint: "/run/a.sock", Versions: []string{"1.0.0"},
		Identity: status.Identity{Name: "a", Version: "1", NodeID: "n", Topology: map[string]string{"zone": "x"}},
	}
	table := config.Driver{
		Connection: config.Connection{Name: "a", Endpoint: told.Endpoint}, SupportedVersions: told.Versions,
		Enabled: !s.leaving, WithdrawAfter: withdrawAfterSeconds * time.Second,
	}
	if s.leave {
		table.WhenLimitChanges = config.Leave
	}
	if s.withdraw {
		table.WhenGone = config.Withdraw
	}
	switch s.settings {
	case "endpoint":
		table.Endpoint = "/run/other.sock"
	case "versions":
		table.SupportedVersions = []string{"1.1.0"}
	}
	id := told.Identity
	switch s.identity {
	case "version":
		id.Version = "2"
	case "topology key added":
		id.Topology = map[string]string{"zone": "x", "rack": "1"}
	case "topology value":
		id.Topology = map[string]string{"zone": "y"}
	case "topology value and node id":
		id.Topology = map[string]string{"zone": "y"}
		id.NodeID = "m"
	case "node id":
		id.NodeID = "m"
	case "volume limit":
		id.MaxVolumes = 7
	}
	in := inputs{
		table: table, checkFailed: s.checkFailed,
		driver: status.View{
			Report: status.Report{Driver: s.driver, Reason: "it says so"},
			Known:  id, KnownSince: at(s.identitySince), LastPresent: at(s.lastPresent), ReturnedAt: at(s.returnedAt),
		},
		socket: status.Socket{
			Up: s.up, Adopted: s.adopted, Place: s.place, DirMissing: s.dirMissing,
			Publication: status.Publication{
				Announced: told, PublishedAt: at(s.publishedAt), GetInfoAt: at(s.getInfoAt),
				Notification: status.Notification{At: at(s.notifiedAt), Registered: s.registered},
			},
		},
	}
	if s.request {
		in.request = pendingRequest{CauseAsked, at(s.requestAt)}
	}
	return in, at(s.now)
}

// facts are the columns of the table: what a situation amounts to.
type facts [6]string

var columns = [...]string{"driver's table", "socket", "driver", "request", "to tell", "kubelet"}

func (s situation) facts() facts {
	var f facts
	f[0] = "enabled"
	if s.leaving {
		f[0] = "disabled or removed"
	}
	switch {
	case !s.up:
		f[1] = "none"
	case s.checkFailed:
		f[1] = "not known"
	case s.place == status.Missing && s.dirMissing:
		f[1] = "directory gone"
	case s.place == status.Missing:
		f[1] = "gone"
	case s.place == status.Foreign:
		f[1] = "replaced"
	default:
		f[1] = "in place"
	}
	f[2] = string(s.driver)
	if s.driver == status.Absent && s.withdraw {
		f[2] = "absent, < 30 s"
		if s.now-s.lastPresent >= withdrawAfterSeconds {
			f[2] = "absent too long"
		}
	}
	f[3] = "none"
	if s.request && s.notifiedAt <= s.requestAt {
		f[3] = "pending"
	}
	learned := s.registered && s.identitySince < s.getInfoAt && s.getInfoAt <= s.notifiedAt
	switch {
	case s.adopted && s.settings == "endpoint" && s.driver != status.Ready:
		f[4] = "earlier endpoint"
	case s.settings == "endpoint", s.settings == "versions",
		slices.Contains([]string{"node id", "topology key added"}, s.identity), s.identity == "volume limit" && !s.leave,
		strings.HasPrefix(s.identity, "topology value") && learned:
		f[4] = "changed"
	default:
		f[4] = "nothing"
	}
	last := max(s.notifiedAt, s.getInfoAt)
	switch late := s.now-last >= retrySeconds; {
	case last == 0 && s.now-s.publishedAt < askSeconds:
		f[5] = "not asked, < 5 s"
	case last == 0:
		f[5] = "not asked"
	case s.registered:
		f[5] = "registered"
	case s.notifiedAt == 0 && !late:
		f[5] = "asked, < 150 s"
	case s.notifiedAt == 0:
		f[5] = "asked"
	case s.returnedAt != 0 && s.getInfoAt <= s.returnedAt:
		f[5] = "refused, driver back"
	case !late:
		f[5] = "refused, < 150 s"
	default:
		f[5] = "refused"
	}
	return f
}

// rule is a row of the table: in a situation that has these facts decide returns this action.
type rule struct {
	when facts // in each column the facts that it is for, or after "any but" is not; empty: any
	then string
}

// rules demand exactly one action for each situation. No order: at most one of them matches.
var rules = []rule{
	{facts{"disabled or removed", "none"}, "nothing"},
	{facts{"disabled or removed", "any but none"}, "withdraw: unconfigured"},
	{facts{"enabled", "not known"}, "nothing"},
	{facts{"enabled", "any but not known", "ready", "pending"}, "publish: asked"},
	{facts{"enabled", "none", "ready", "none"}, "publish: first"},
	{facts{"enabled", "none", "any but ready"}, "nothing"},
	{facts{"enabled", "any but none / not known", "mismatch"}, "withdraw: mismatch"},
	{facts{"enabled", "directory gone / gone / replaced", "absent / starting / hanging"}, "nothing"},
	{facts{"enabled", "directory gone / gone / replaced", "absent, < 30 s"}, "nothing until 30s"},
	{facts{"enabled", "in place", "absent / starting / hanging", "", "any but earlier endpoint"}, "nothing"},
	{facts{"enabled", "in place", "absent, < 30 s", "", "any but earlier endpoint"}, "nothing until 30s"},
	{facts{"enabled", "in place", "absent / absent, < 30 s / starting / hanging", "", "earlier endpoint"}, "publish: changed"},
	{facts{"enabled", "any but none / not known", "absent too long"}, "withdraw: gone"},
	{facts{"enabled", "directory gone", "ready", "none"}, "publish: removed, after 1s"},
	{facts{"enabled", "gone", "ready", "none"}, "publish: removed, after 50ms"},
	{facts{"enabled", "replaced", "ready", "none"}, "publish: replaced, after 50ms"},
	{facts{"enabled", "in place", "ready", "none", "changed"}, "publish: changed"},
	{facts{"enabled", "in place", "ready", "none", "nothing", "not asked, < 5 s"}, "nothing until 5s"},
	{facts{"enabled", "in place", "ready", "none", "nothing", "not asked / registered"}, "nothing"},
	{facts{"enabled", "in place", "ready", "none", "nothing", "asked, < 150 s / refused, < 150 s"}, "nothing until 2m30s"},
	{facts{"enabled", "in place", "ready", "none", "nothing", "asked / refused"}, "publish: kubelet-silent"},
	{facts{"enabled", "in place", "ready", "none", "nothing", "refused, driver back"}, "publish: returned"},
}

func (r rule) matches(f facts) bool {
	for i, cell := range r.when {
		list, but := strings.CutPrefix(cell, "any but ")
		if cell != "" && slices.Contains(strings.Split(list, " / "), f[i]) == but {
			return false
		}
	}
	return true
}

// decided is what decide returns, in the words of the table.
func (s situation) decided() string {
	in, now := s.inputs()
	a := decide(in, now)
	var text string
	switch a.kind {
	case nothing:
		text = "nothing"
		if !a.next.IsZero() {
			last := max(s.notifiedAt, s.getInfoAt)
			switch {
			case s.driver == status.Absent:
				last = s.lastPresent
			case last == 0:
				last = s.publishedAt
			}
			text += " until " + (a.next.Sub(now) + time.Duration(s.now-last)*time.Second).String()
		}
	case publish:
		text = "publish: " + string(a.cause)
	case withdraw:
		text = "withdraw: " + string(a.cause)
	}
	if a.quiet > 0 {
		text += ", after " + a.quiet.String()
	}
	return text
}

// around returns the times just before, at and just after t.
func around(t int) []int { return []int{t - 1, t, t + 1} }

var bools = []bool{false, true}

// eachSituation calls f with every combination of two groups of inputs. The first is what counts
// before it counts what the kubelet should be told. The second is a driver that is ready and a
// socket that is in place, with all that the kubelet and the driver can have said, in any order.
func eachSituation(f func(situation)) {
	const now = 1000
	var s situation
	eachCall := func(f func()) {
		for _, last := range around(now - retrySeconds) {
			for _, kubelet := range []string{"", "registered", "refused"} {
				for _, getInfo := range []int{0, last - 1, last, last + 1} {
					s.now, s.registered, s.notifiedAt, s.getInfoAt = now, kubelet == "registered", last, getInfo
					if kubelet == "" {
						s.notifiedAt = 0
					}
					for _, s.publishedAt = range around(now - askSeconds) {
						if s.publishedAt == now-askSeconds || s.notifiedAt == 0 && s.getInfoAt == 0 {
							f()
						}
					}
				}
			}
		}
	}
	eachRequest := func(f func()) {
		for _, s.request = range bools {
			for _, s.requestAt = range around(now - retrySeconds) {
				f()
			}
		}
	}
	eachPlace := func(f func()) {
		for _, s.leaving = range bools {
			for _, s.checkFailed = range bools {
				for _, s.up = range bools {
					for _, s.place = range []status.Place{status.Missing, status.Foreign, status.Ours} {
						for _, s.dirMissing = range bools {
							f()
						}
					}
				}
			}
		}
	}
	eachDriver := func(f func()) {
		for _, s.driver = range driverStates {
			for _, s.withdraw = range bools {
				for _, s.lastPresent = range around(now - withdrawAfterSeconds) {
					f()
				}
			}
		}
	}
	call := func() { f(s) }
	eachPlace(func() {
		eachDriver(func() {
			for _, s.identity = range []string{"", "node id"} {
				for _, s.registered = range bools {
					for _, s.request = range bools {
						s.now, s.notifiedAt, s.requestAt, s.publishedAt = now, now-2, now-2, now-3
						for _, s.settings = range []string{"", "endpoint"} {
							for _, s.adopted = range bools {
								call()
							}
						}
					}
				}
			}
		})
	})
	s = situation{up: true, driver: status.Ready, place: status.Ours}
	eachRequest(func() {
		eachCall(func() {
			for _, s.identitySince = range around(now - retrySeconds - 1) {
				for _, s.returnedAt = range append(around(now-retrySeconds), 0) {
					for _, s.identity = range identities {
						for _, s.settings = range settingsChanges {
							for _, s.leave = range bools {
								call()
							}
						}
					}
				}
			}
		})
	})
}

// TestDecideFollowsItsTable enumerates the inputs of decide, with times before, at and after each
// limit. Each situation has exactly one rule, each rule a situation, and each Cause a rule.
func TestDecideFollowsItsTable(t *testing.T) {
	reached, situations, wrong := make([]int, len(rules)), 0, 0
	ruleOf := make(map[facts]int)
	eachSituation(func(s situation) {
		situations++
		f := s.facts()
		found, ok := ruleOf[f]
		if !ok {
			found = -1
			for i, r := range rules {
				switch {
				case !r.matches(f):
				case found < 0:
					found = i
				default:
					t.Errorf("two rules for %q: %q and %q", f, rules[found], r)
				}
			}
			if found < 0 {
				t.Fatalf("no rule for %q", f)
			}
			ruleOf[f] = found
		}
		reached[found]++
		if got := s.decided(); got != rules[found].then {
			if wrong++; wrong <= 10 {
				t.Errorf("decide returns %q, and the table demands %q\nfor %q: %+v", got, rules[found].then, f, s)
			}
		}
	})
	t.Logf("%d situations with %d sets of facts; %d have the wrong action", situations, len(ruleOf), wrong)
	for i, n := range reached {
		if n == 0 {
			t.Errorf("no situation has the facts of %q", rules[i])
		}
	}
	for _, cause := range []Cause{CauseFirst, CauseRemoved, CauseReplaced, CauseChanged, CauseAsked, CauseReturned, CauseSilent,
		CauseGone, CauseMismatch, CauseLeaving} {
		if !slices.ContainsFunc(rules, func(r rule) bool { return strings.Contains(r.then+",", ": "+string(cause)+",") }) {
			t.Errorf("no rule has the cause %q", cause)
		}
	}
}

// TestDecideTableIsDocumented holds ARCHITECTURE.md to the rules.
func TestDecideTableIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	fmt.Fprintf(&want, "| %s | action |\n|%s\n", strings.Join(columns[:], " | "), strings.Repeat("---|", len(columns)+1))
	for _, r := range rules {
		cells := slices.Clone(r.when[:])
		for i, c := range cells {
			if c == "" {
				cells[i] = "any"
			}
		}
		fmt.Fprintf(&want, "| %s | %s |\n", strings.Join(cells, " | "), r.then)
	}
	if !strings.Contains(string(text), want.String()) {
		t.Errorf("ARCHITECTURE.md does not have the table of decide.go:\n%s", want.String())
	}
}
