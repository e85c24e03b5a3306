package repotest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// promises are the promises of SECURITY.md, with the tests that fail when one is broken.
var promises = map[string][]string{
	"Nothing that others say becomes a command, a path or a terminal escape.": {
		"FuzzCommand", "TestNoCommandForAPathOfAnotherUser", "FuzzName", "TestBadAnnouncementsAndNames", "FuzzClean"},
	"The port shows health, states and metrics, and no texts of drivers.":             {"TestPublicHandler", "TestPublicPagesShowNoReasons"},
	"A flood of connections or requests neither blocks nor delays it.":                {"TestFloodOfThePublicPort", "TestIdleConnectionsKeepNobodyOut"},
	"`Host:` is checked on loopback addresses.":                                       {"TestHostIsChecked"},
	"A process that calls itself kubelet is ignored unless it is root's.":             {"TestOnlyProcessesOfRootAreKubelets", "TestKubeletsOfOthersDoNotChooseTheRootDirectory"},
	"Files are opened only if they are root's, regular and small.":                    {"TestReadFile", "TestOnlyRegularFilesAreOpened"},
	"It can change only the registration of its own driver.":                          {"TestUntrustedIsNeverAsked", "TestAnswers"},
	"Symbolic links are followed only into its own directories.":                      {"TestTrust"},
	"Its name, node ID and topology are checked.":                                     {"TestAnswers", "TestValidateNode"},
	"At most 1 MiB a minute is read, over all connections.":                           {"TestFloodEndsTheConnectionAndIsLeftAloneForAWhile", "TestBudgetIsThatOfAllConnections"},
	"Its texts are bounded, cleaned and shown in quotes.":                             {"FuzzAnswers", "TestStatusDocumentIsHarmless", "TestHostileNode"},
	"It cannot reach the registration of another driver.":                             {"TestAnswers", "TestBadAnnouncementsAndNames"},
	"The output is TOML and comments, in which every text of the manifest is quoted.": {"FuzzImport"},
	"Files, directories and links on the path that users other than root can write are errors.": {
		"TestWritableDirectoryIsAnError", "TestStickyDropInDirectoryIsAnError", "TestCheck"},
	"Their files are not removed or replaced.":                           {"TestNothingIsReplaced", "TestOthersAreLeftAlone"},
	"Conflicts are reported.":                                            {"TestForeignSockets"},
	"Calls are accepted only from uid 0 and from the daemon's own user.": {"TestOnlyRootMayCall"},
	"A socket has at most 64 connections.":                               {"TestTooManyConnections"},
	"A connection that does not speak HTTP/2 is closed after 10 s, and one without a call after 3 minutes.": {"TestLimitSilentCallers", "TestLimitIdleCallers"},
	"It has no capability and no network.": {"TestSandbox", "TestShippedSandbox"},
	"It can write the registration sockets, the records and the last good configuration, and nothing that the kubelet or systemd runs.":     {"TestSandbox", "TestShippedSandbox"},
	"It can set no mode, time or extended attribute of a file, and no limit of another process.":                                            {"TestSandbox", "TestShippedSandbox"},
	"With Landlock (Linux 5.13) it cannot write to what is mounted over root_dir later; before Linux 6.2 it can empty files there.":         {"TestSandbox", "TestConfine"},
	"From Linux 6.12 on it can signal no other process.":                                                                                    {"TestSandbox", "TestConfine"},
	"Without Landlock it can write to a later mount only until the daemon has ended for a new sandbox.":                                     {"TestSandboxFollowsTheDirectories", "TestSandboxFollowsAMount", "TestLandlock"},
	"It cannot reach systemd's private socket, the runtimes' sockets, /etc/shadow and the kubelet's keys as far as the unit can hide them.": {"TestSandbox", "TestKeysAreHidden", "TestShippedSandbox"},
	"It cannot reach root's terminals, journald's control socket, and, from systemd 248 on, the IPC of other services.":                     {"TestSandbox", "TestShippedSandbox"},
	"A descriptor that it leaves in the store is used only if it matches its name.":                                                         {"TestJunkInTheDescriptorStore"},
	"A registration that it leaves with another endpoint than the configured one is made again, also while the driver is absent.":           {"TestTakeoverWithItsRecord", "TestTakeoverWithAForgedRecord"},
	"A driver that it leaves in the last good configuration is not registered while the files are valid.":                                   {"TestServedTrustsOnlyRoot", "TestGracePeriodAtStartIsForWhatTheStoreKept"},
}

// TestSecurity checks that SECURITY.md has these promises and no other, and that their tests exist.
func TestSecurity(t *testing.T) {
	page := read(t, "SECURITY.md")
	text, found := strings.Join(strings.Fields(page), " "), bullets(page, "Promises")
	exists := testNames(t)
	for promise, tests := range promises {
		for _, name := range tests {
			if !exists[name] {
				t.Errorf("%q: there is no %s", promise, name)
			}
		}
		if !strings.Contains(text, promise) {
			t.Errorf("SECURITY.md does not have %q", promise)
		}
	}
	for _, promise := range found {
		if promises[promise] == nil {
			t.Errorf("no test holds the promise %q", promise)
		}
	}
	if len(found) < 25 {
		t.Errorf("only %d promises were found", len(found))
	}
}

// TestNotPrevented compares what SECURITY.md does not promise with what TestSandbox does.
func TestNotPrevented(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(top, "internal/test/e2e/system/not_prevented_test.go"), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	sentences, used := map[string]string{}, map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ValueSpec:
			if literal, ok := n.Values[0].(*ast.BasicLit); ok {
				value, err := strconv.Unquote(literal.Value)
				if err != nil {
					t.Fatal(err)
				}
				sentences[n.Names[0].Name] = "It can " + value + "."
			}
		case *ast.KeyValueExpr:
			if name, ok := n.Value.(*ast.Ident); ok {
				used[name.Name] = true
			}
		}
		return true
	})
	for name, sentence := range sentences {
		if !used[name] {
			t.Errorf("TestSandbox does not try that %q", sentence)
		}
	}
	want, got := slices.Sorted(maps.Values(sentences)), bullets(read(t, "SECURITY.md"), "Not prevented")
	if slices.Sort(got); len(want) < 5 || !slices.Equal(got, want) {
		t.Errorf("SECURITY.md has\n%s\nthe test\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(top, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// bullets returns the list entries of a section of a page, each on one line.
func bullets(text, section string) (entries []string) {
	_, text, _ = strings.Cut(text, "\n## "+section+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	more := false // the line before was part of an entry
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		entry, begins := strings.CutPrefix(line, "- ")
		switch {
		case begins:
			entries = append(entries, entry)
		case more && line != "":
			entries[len(entries)-1] += " " + line
		}
		more = begins || more && line != ""
	}
	return entries
}
