package storage_test

import (
	"encoding/json"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// leftOut are the tests that would fail or do not apply to this driver, as expressions for their
// names, with the reasons.
var leftOut = map[string]string{
	`Testpattern: .*\(ntfs\)`: "of Windows",
	"External Storage.*Testpattern: (Pre-provisioned PV|Inline-volume)": "of volumes that an external driver cannot have; Pre-provisioned Storage has the first",
	"should provision storage with any volume data source":              "needs images of programs that are in no Go module: hello-populator, volume-data-source-validator",
	`Testpattern: .*\] disruptive \[LinuxOnly\]`:                        "restarts the kubelet by ssh, which the node does not have; internal/test/e2e/node restarts it",
	"should remount stale subpath bind mount":                           "stops a container with crictl, which the node does not have",
}

// reasons has explanations for skip reasons that are too short.
var reasons = map[string]string{
	"No SSH Key": "restarts the kubelet by ssh, which the node does not have; internal/test/e2e/node restarts it",
}

// spec has the fields of a test in ginkgo's report that are read here.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}

// results prints how many tests ran, passed and were skipped and why, and fails for each one that
// failed.
func results(t *testing.T, report string) {
	t.Helper()
	b, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(b, &suites); err != nil {
		t.Fatal(err)
	}
	states, skipped := map[string]int{}, map[string]int{}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			switch {
			case s.LeafNodeType != "It" && s.State == "passed":
				continue
			case s.State == "passed":
			case s.State == "skipped":
				skipped[reason(s)]++
			default:
				t.Errorf("%s: %s after %s\n%s", s.State, s.name(), s.RunTime.Round(time.Second), s.Failure.Message)
			}
			states[s.State]++
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(skipped)) {
		t.Logf("skipped %4d: %s", skipped[reason], reason)
	}
	ran := 0
	for state, count := range states {
		if state != "skipped" && state != "pending" {
			ran += count
		}
	}
	t.Logf("ran %d, passed %d, skipped %d, pending %d", ran, states["passed"], states["skipped"], states["pending"])
	if want := 76; os.Getenv("FOCUS") == "" && ran < want {
		t.Errorf("%d tests ran before: which are skipped now, and why?", want)
	}
}

// reason returns why a test was skipped.
func reason(s spec) string {
	for name, why := range leftOut {
		if regexp.MustCompile(name).MatchString(s.name()) {
			return why
		}
	}
	if s.Failure.Message == "" {
		return "not selected: not of this driver, or of FOCUS"
	}
	for words, why := range reasons {
		if strings.Contains(s.Failure.Message, words) {
			return why
		}
	}
	return s.Failure.Message
}
