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

// cannotRun are the tests that cannot run here, by words in their names, and why.
var cannotRun = map[string]string{}

// leftOut is an expression that matches their names.
func leftOut(t *testing.T) string {
	t.Helper()
	names := []string{"nothing is left out"}
	for name := range cannotRun {
		names = append(names, regexp.QuoteMeta(name))
	}
	return strings.Join(names, "|")
}

// spec is what is read of a test in ginkgo's report.
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

// results prints how many tests ran, passed and were skipped and why, and fails for each one that failed.
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
	states, reasons := map[string]int{}, map[string]int{}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			switch {
			case s.LeafNodeType != "It" && s.State != "failed":
				continue
			case s.State == "passed":
			case s.State == "skipped":
				reasons[skipped(s)]++
			default:
				t.Errorf("%s: %s after %s\n%s", s.State, s.name(), s.RunTime.Round(time.Second), s.Failure.Message)
			}
			states[s.State]++
		}
	}
	for _, reason := range slices.Sorted(maps.Keys(reasons)) {
		t.Logf("skipped %4d: %s", reasons[reason], reason)
	}
	ran := 0
	for state, count := range states {
		if state != "skipped" && state != "pending" {
			ran += count
		}
	}
	t.Logf("ran %d, passed %d, skipped %d, pending %d", ran, states["passed"], states["skipped"], states["pending"])
	if states["passed"] == 0 {
		t.Error("no test passed")
	}
}

// skipped is why a test was skipped.
func skipped(s spec) string {
	for name, reason := range cannotRun {
		if strings.Contains(s.name(), name) {
			return reason
		}
	}
	if s.Failure.Message == "" {
		return "not selected"
	}
	return s.Failure.Message
}
