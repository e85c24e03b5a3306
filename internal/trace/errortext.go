package trace

import (
	"slices"
	"strings"
	"unicode"
)

const hiddenWord = "(hidden)"

// sensitive are words after which an error text is hidden to its end.
var sensitive = []string{"pass", "pwd", "secret", "token", "bearer", "authorization", "credential", "apikey", "api-key", "api_key", "private"}

// shownNames are the names that are shown as name=value in an error text.
var shownNames = []string{"code", "desc", "error", "err", "errno", "status", "exit"}

// errorText is the text of an error without what could be confidential: a driver may repeat
// parts of the request, of its configuration, or the command that it ran. What remains are
// plain words, numbers, and what the call's messages show anyway. With whole, which a person
// asks for by the key ErrorText, it is the text without the request's secrets.
//
// Without a request that was decoded nothing is known of its secrets, and nothing is shown.
func errorText(text string, request *redactor, whole bool) string {
	if text == "" {
		return ""
	}
	if request == nil || request.partial {
		return hiddenWord
	}
	text = without(text, request.secrets)
	if whole {
		return text
	}
	text = without(text, request.hidden)
	words := strings.Fields(text)
	for i, word := range words {
		if isSensitive(word) {
			words = append(words[:i], hiddenWord)
			break
		}
		if !harmless(word, request.shown) {
			words[i] = hiddenWord
		}
	}
	return strings.Join(slices.Compact(words), " ")
}

// without replaces values wherever they are in the text, the longest first. A value of one or
// two characters is in every text.
func without(text string, values []string) string {
	values = slices.Clone(values)
	slices.SortFunc(values, func(a, b string) int { return len(b) - len(a) })
	for _, v := range values {
		if len(v) > 2 {
			text = strings.ReplaceAll(text, v, hiddenWord)
		}
	}
	return text
}

func isSensitive(word string) bool {
	word = strings.ToLower(word)
	return slices.ContainsFunc(sensitive, func(s string) bool { return strings.Contains(word, s) })
}

// harmless reports whether a word of an error text can be shown.
func harmless(word string, shown []string) bool {
	word = strings.Trim(word, `.,:;!?()[]{}<>'"`)
	if name, value, is := strings.Cut(word, "="); is && (name == "" || slices.Contains(shownNames, strings.ToLower(name))) {
		word = value
	}
	return word == strings.Trim(hiddenWord, "()") || slices.Contains(shown, word) || plainWord(word)
}

// Longest runs of characters of one kind in a plain word.
const (
	maxLetters = 24
	maxDigits  = 6
)

// plainWord reports whether a word looks like one of a language, a number, an address with or
// without a port, or a path of these: a key or a password mixes letters and digits, or is
// longer, and a name before a password has letters.
func plainWord(word string) bool {
	pair := strings.Contains(word, ":")
	for run := range strings.FieldsFuncSeq(word, func(c rune) bool { return strings.ContainsRune("-_./:", c) }) {
		letters := strings.TrimFunc(run, unicode.IsLetter) == "" && !pair
		digits := strings.Trim(run, "0123456789") == ""
		if !(letters && len(run) <= maxLetters || digits && len(run) <= maxDigits) {
			return false
		}
	}
	return true
}
